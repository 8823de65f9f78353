"""Compile settings of Qualcomm Cloud AI, brought into one spelling.

Users write them in several ways (``mxfp6``, ``mxfp6_en`` and ``mxfp6_matmul`` are one setting, ``device_id`` may be
an int, a list or text), and the engine takes them all. One spelling lets settings be compared and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from disagg.engines.findings import shown

Config = dict[str, JsonValue]

ALIASES: Mapping[str, str] = {
    "aic_num_cores": "num_cores",
    "device_id": "device_group",
    "device_ids": "device_group",
    "mxfp6": "mxfp6_matmul",
    "mxfp6_en": "mxfp6_matmul",
    "mxint8": "mxint8_kv_cache",
    "mxint8_en": "mxint8_kv_cache",
    "aic_enable_depth_first": "dfs",
}
"""Other names of a setting."""

IGNORED = frozenset({"ctx_len", "batch_size", "full_batch_size", "num_speculative_tokens"})
"""Settings that follow from the serving flags."""

_PATHS = frozenset(
    {
        "qpc_path",
        "mdp_load_partition_config",
        "mdp_dump_partition_config",
        "mdp_compiler_dump_path",
        "aic_pmu_recipe",
        "node_precision_info",
    }
)
_INTEGERS = frozenset({"num_cores", "num_devices", "mos", "mdts_mos", "stages", "prefill_seq_len"})
_SWITCHES = frozenset(
    {
        "mxfp6_matmul",
        "mxint8_kv_cache",
        "dfs",
        "split_retained_state_io",
        "split_model_io",
        "allow_mxint8_mdp_io",
        "prefill_only",
        "ccl_enabled",
        "kv_offload",
        "normalize",
        "softmax",
        "aic_include_sampler",
    }
)
_CONTEXT_LENGTHS = frozenset({"comp_ctx_lengths_prefill", "comp_ctx_lengths_decode"})
_TRUE, _FALSE = frozenset({"", "true", "1"}), frozenset({"false", "0"})


@dataclass(slots=True)
class Override:
    """Settings in one spelling.

    Attributes:
        config: The settings, keys in the order written.
        errors: What cannot be read, a sentence each.
        notes: What was left out and why, a sentence each.
    """

    config: Config = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def integer(self, key: str) -> int | None:
        """A setting that is a whole number; None if it is absent."""
        value = self.config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def is_on(self, key: str) -> bool:
        """Whether a switch is set to true."""
        return self.config.get(key) is True

    @property
    def device_group(self) -> tuple[int, ...] | None:
        """Explicit QIDs, if there are any."""
        value = self.config.get("device_group")
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, list) else None


def normalise(given: Mapping[str, JsonValue], max_model_len: int | None) -> Override:
    """Bring compile settings into one spelling; doing it again changes nothing.

    Args:
        given: Settings as the user wrote them.
        max_model_len: Context limit of the stage in tokens, which bounds compiled context lengths; None if unknown.
    """
    result = Override()
    for written, value in _expanded(given):
        key = written.strip().lower().replace("-", "_")
        key = ALIASES.get(key, key)
        if value is None:
            continue
        if key in IGNORED:
            result.notes.append(f"{key} is left out: it follows from the serving flags")
            continue
        try:
            read = _reader(key)(value)
        except ValueError as error:
            result.errors.append(f"{key}: {error}")
            continue
        if result.config.setdefault(key, read) != read:
            result.errors.append(f"{key} is given twice, as {shown(result.config[key])} and {shown(read)}")
    _count_devices(result)
    _bound_contexts(result, max_model_len)
    return result


def _expanded(given: Mapping[str, JsonValue]) -> Iterable[tuple[str, JsonValue]]:
    for key, value in given.items():
        if key.strip().lower().replace("-", "_") != "compiler_args":
            yield key, value
            continue
        items = value if isinstance(value, list) else re.split(r"[ |]+", value) if isinstance(value, str) else []
        for item in items:
            name, equals, text = str(item).strip().lstrip("-").partition("=")
            if name:
                yield name, text if equals else True


def _reader(key: str) -> Callable[[JsonValue], JsonValue]:
    if key == "device_group":
        return _read_devices
    if key in _INTEGERS:
        return _read_integer
    if key in _CONTEXT_LENGTHS or key == "embed_seq_len":
        return _read_lengths
    if key in _SWITCHES:
        return _read_switch
    return _read_path if key in _PATHS else _read_other


def _read_devices(value: JsonValue) -> JsonValue:
    items = value
    if isinstance(value, str):
        items = [item for item in re.split(r"[\s,\[\]]+", value) if item]
    ids = [_whole(item) for item in (items if isinstance(items, list) else [items])]
    if not ids or any(i < 0 for i in ids):
        raise ValueError(f"{shown(value)} names no devices; write [0,1] or 0,1")
    if len(set(ids)) != len(ids):
        raise ValueError(f"{shown(value)} repeats a device")
    return list(ids)


def _read_lengths(value: JsonValue) -> JsonValue:
    items: JsonValue = value
    if isinstance(value, str):
        items = [item for item in re.split(r"[\s,\[\]]+", value) if item]
    lengths = {_whole(item) for item in (items if isinstance(items, list) else [items])}
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{shown(value)} is no list of lengths in tokens; write 1024,4096")
    return [*sorted(lengths)]


def _read_integer(value: JsonValue) -> JsonValue:
    return _whole(value)


def _read_switch(value: JsonValue) -> JsonValue:
    text = _lower(value)
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{shown(value)} is neither true nor false")


def _read_path(value: JsonValue) -> JsonValue:
    # A path keeps its letters; only the words for true and false have a meaning of their own.
    read = _read_other(value)
    return value.strip() if isinstance(read, str) and isinstance(value, str) else read


def _read_other(value: JsonValue) -> JsonValue:
    if not isinstance(value, str):
        return value
    text = _lower(value)
    if text in _TRUE:
        return True
    return False if text in _FALSE else text


def _lower(value: JsonValue) -> str:
    return value.strip().lower() if isinstance(value, str) else shown(value).lower()


def _whole(value: JsonValue) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
        return int(value)
    raise ValueError(f"{shown(value)} is not a whole number")


def _count_devices(result: Override) -> None:
    group = result.device_group
    if group is None:
        return
    count = result.config.setdefault("num_devices", len(group))
    if count != len(group):
        result.errors.append(f"num_devices is {shown(count)} but device_group has {len(group)} devices")


def _bound_contexts(result: Override, max_model_len: int | None) -> None:
    if max_model_len is None:
        return
    for key in sorted(_CONTEXT_LENGTHS & result.config.keys()):
        lengths = result.config[key]
        if isinstance(lengths, list) and any(isinstance(n, int) and n > max_model_len for n in lengths):
            del result.config[key]
            result.notes.append(
                f"{key} is left out: {shown(lengths)} has a length above max_model_len {max_model_len}"
            )
    lengths = result.config.get("embed_seq_len")
    if isinstance(lengths, list) and max_model_len not in lengths:
        result.errors.append(f"embed_seq_len: {shown(lengths)} lacks max_model_len {max_model_len}")
