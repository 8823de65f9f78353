"""Do the parts of a topology fit together? Everything that can be said without looking at the machine.

Problems name places in the topology; `Provenance.explain` turns these into flags and lines. An adapter adds what
only its engine knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.errors import ConfigError, Problem
from disagg.topology.device_checks import check_devices, repeated
from disagg.topology.effective import stage_path, stage_value
from disagg.topology.instances import count_problems, explicit_ports, plan_instances
from disagg.topology.spec import Platform, Stage, Topology

_SAME_KV_FORMAT = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "fp8"}
_SAME_ON_QAIC = {"auto": "float16", "fp16": "float16", "fp8": "mxint8"}
_QAIC_KV_FORMATS = ("auto", "fp16", "float16", "fp8", "mxint8")
_WITHOUT_KV = "an encoder has no KV cache"
_NOT_FOR_ENCODE = {
    "kv_cache_dtype": _WITHOUT_KV,
    "block_size": _WITHOUT_KV,
    "speculative_config": "an encoder generates no tokens",
    "max_seq_len_to_capture": "an encoder has no prompt chunks",
}


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found.

    Attributes:
        errors: Problems that stop a deployment.
        warnings: Oddities worth telling.
        whole: Whether the pools make a deployment at all, so that more checks make sense.
    """

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    whole: bool


def check_topology(topology: Topology, platform: Platform) -> Findings:
    """Check a topology for a platform, all at once.

    Args:
        topology: A topology whose single values are right.
        platform: What `auto` stands for on this machine, or the topology's own platform.
    """
    stage_errors = list(_stages(topology))
    errors = list(stage_errors)
    checks: tuple[Callable[[Topology, Platform], Iterator[Problem]], ...] = (
        _counts,
        _ports,
        _same_kv,
        _kv_formats,
        _encode_fields,
        _speculation,
        _link,
        _names,
    )
    for check in checks:
        errors.extend(check(topology, platform))
    errors.extend(check_devices(topology, platform))
    return Findings(tuple(errors), tuple(_context(topology)), whole=not stage_errors)


def _stages(topology: Topology) -> Iterator[Problem]:
    has = {stage: topology.pool(stage) is not None for stage in Stage}
    if not any(has.values()):
        yield Problem(
            "prefill, decode",
            "there are no pools; give at least --prefill-device-group and --decode-device-group, or "
            "--prefill-replicas 1 and --decode-replicas 1, or the same in a file",
        )
        return
    if has[Stage.DECODE]:
        if not has[Stage.PREFILL] and not has[Stage.ENCODE]:
            yield Problem(
                "decode, prefill",
                "a decode pool needs a prefill pool (xPyD) or an encode pool (xEyPD) before it; give "
                "--prefill-device-group, or use a colocated pool for instances that do both",
            )
        return
    waiting = [s.value for s in (Stage.ENCODE, Stage.PREFILL) if has[s]]
    if waiting:
        yield Problem(
            f"{waiting[-1]}, decode",
            f"{' and '.join(waiting)} without a decode pool cannot answer anyone; give --decode-device-group",
        )


def _counts(topology: Topology, _: Platform) -> Iterator[Problem]:
    for stage in topology.stages():
        pool = topology.pool(stage)
        if pool is not None:
            yield from count_problems(pool, stage)


def _ports(topology: Topology, platform: Platform) -> Iterator[Problem]:
    ports = explicit_ports(topology)
    if platform is Platform.QAIC:
        ports["link.handoff_port"] = topology.link.handoff_port
    if topology.router.admin_port is not None:
        ports["router.admin_port"] = topology.router.admin_port
    owners: dict[int, list[str]] = {}
    for path, port in ports.items():
        owners.setdefault(port, []).append(path)
    for port, paths in owners.items():
        if len(paths) > 1:
            names = " and ".join("the endpoint" if p == "port" else _listener(p) for p in paths)
            yield Problem(", ".join(paths), f"port {port} is given to {names}; each needs its own")
    if any(_counts(topology, platform)):
        return
    try:
        plan_instances(topology)
    except ConfigError as error:
        yield from error.problems


def _listener(path: str) -> str:
    if path == "router.admin_port":
        return "the admin API"
    stage, _, index = path.partition(".ports.")
    return f"{stage}-{index}" if index else "the KV hand-off service"


def _same_kv(topology: Topology, platform: Platform) -> Iterator[Problem]:
    """Prefill writes the blocks that decode reads, so format and size are one decision."""
    if topology.prefill is None or topology.decode is None:
        return
    same = {**_SAME_KV_FORMAT, **(_SAME_ON_QAIC if platform is Platform.QAIC else {})}
    for name, word in (("kv_cache_dtype", "number format"), ("block_size", "block size")):
        values = {stage: stage_value(topology, stage, name) for stage in (Stage.PREFILL, Stage.DECODE)}
        if name == "kv_cache_dtype":
            values = {stage: value or "auto" for stage, value in values.items()}
        canonical = {same.get(str(value), str(value)) for value in values.values()}
        if len(canonical) > 1:
            places = ", ".join(dict.fromkeys(stage_path(topology, stage, name) for stage in values))
            said = " and ".join(f"{s} has {v if v is not None else 'the default'}" for s, v in values.items())
            yield Problem(
                places,
                f"prefill and decode need the same KV {word}, but {said}; set it once for both with "
                f"--{name.replace('_', '-')}",
            )


def _kv_formats(topology: Topology, platform: Platform) -> Iterator[Problem]:
    if platform is Platform.EMULATED:
        return
    seen: set[str] = set()
    for stage in topology.stages():
        path = stage_path(topology, stage, "kv_cache_dtype")
        value = stage_value(topology, stage, "kv_cache_dtype")
        if value is None or path in seen:
            continue
        seen.add(path)
        if platform is Platform.QAIC and value not in _QAIC_KV_FORMATS:
            yield Problem(
                path, f"{value} is not a KV format of Qualcomm Cloud AI; it has {', '.join(_QAIC_KV_FORMATS)}"
            )
        if platform is not Platform.QAIC and value == "mxint8":
            yield Problem(
                path, f"mxint8 is a format of Qualcomm Cloud AI and unknown on {platform}; fp8 is the nearest"
            )


def _encode_fields(topology: Topology, _: Platform) -> Iterator[Problem]:
    for name, reason in _NOT_FOR_ENCODE.items():
        if getattr(topology.encode, name, None) is not None:
            yield Problem(f"encode.{name}", f"has no meaning for the encode stage: {reason}; remove it")


def _speculation(topology: Topology, platform: Platform) -> Iterator[Problem]:
    if platform is Platform.QAIC and topology.prefill is not None and topology.prefill.speculative_config is not None:
        yield Problem(
            "prefill.speculative_config",
            "speculation is made and verified on decode alone; give --decode-speculative-config",
        )


def _link(topology: Topology, _: Platform) -> Iterator[Problem]:
    link = topology.link
    if link.handoff_store_mb is not None and link.handoff_store_entries is not None:
        yield Problem(
            "link.handoff_store_mb, link.handoff_store_entries", "the hand-off store has one size; give MB or entries"
        )


def _names(topology: Topology, _: Platform) -> Iterator[Problem]:
    for name in repeated(topology.served_model_name or ()):
        yield Problem("served_model_name", f"{name!r} is given twice")


def _context(topology: Topology) -> Iterator[Problem]:
    limits = {
        stage: stage_value(topology, stage, "max_model_len")
        for stage in (Stage.PREFILL, Stage.DECODE)
        if topology.pool(stage) is not None
    }
    if len(set(limits.values())) > 1 and None not in limits.values():
        places = ", ".join(dict.fromkeys(stage_path(topology, stage, "max_model_len") for stage in limits))
        said = " and ".join(f"{stage} takes {limit} tokens" for stage, limit in limits.items())
        yield Problem(places, f"{said}; the endpoint takes the smaller, {min(limits.values())}")
