"""Flags of the engine on our command line: with a stage in front for one pool, without for all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import JsonValue

from disagg.engines.base import FlagSpec, FlagTable
from disagg.topology.flags import flags_by_name
from disagg.topology.forms import parse_json, whole_number
from disagg.topology.messages import nearest, show
from disagg.topology.spec import Stage

_INTEGER = re.compile(r"[-+]?\d{1,19}")


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """An engine flag as it was written, found in the engine's table.

    Attributes:
        place: Path of the `engine_args` that it goes to.
        key: Its key there: the engine's name, with a dotted part if it has one.
        spec: What the engine says about it; None if the flag is only known as reserved.
        reserved: What to use instead, if users may not set it.
        negated: Whether it is the ``no-`` twin of a boolean flag.
        part: Whether it sets a part of a JSON flag, as in ``compilation-config.level``.
    """

    place: tuple[str, ...]
    key: str
    spec: FlagSpec | None
    reserved: str | None
    negated: bool
    part: bool

    @property
    def takes_none(self) -> bool:
        """Whether no value follows it."""
        return self.spec is not None and self.spec.kind == "bool" and not self.part


def engine_flag(name: str, table: FlagTable | None) -> EngineFlag | None:
    """Look a flag up: first as a stage and a flag of the engine, then as the engine's own whole name.

    Args:
        name: The flag without leading dashes.
        table: The engine's flags.
    """
    if table is None:
        return None
    for stage in Stage:
        rest = name.removeprefix(f"{stage}-")
        if rest != name and (found := _look_up(rest, (stage.value, "engine_args"), table)) is not None:
            return found
    return _look_up(name, ("engine_args",), table)


def _look_up(name: str, place: tuple[str, ...], table: FlagTable) -> EngineFlag | None:
    base, dot, _ = name.partition(".")
    if base in table.flags or base in table.reserved:
        return EngineFlag(place, name, table.flags.get(base), table.reserved.get(base), negated=False, part=bool(dot))
    positive = base.removeprefix("no-")
    spec = table.flags.get(positive)
    if positive != base and not dot and spec is not None and spec.kind == "bool":
        return EngineFlag(place, positive, spec, table.reserved.get(positive), negated=True, part=False)
    return None


def engine_value(flag: EngineFlag, words: Sequence[str]) -> JsonValue:
    """Bring the words behind an engine flag into the type that its kind has in YAML.

    Only the form is decided here. Whether the engine takes the value is for its adapter to say, which checks values
    from files as well.

    Raises:
        ValueError: If there is no value, or it cannot have the form.
    """
    if not words:
        raise ValueError("needs a value")
    text = words[0]
    if flag.part:
        return text if flag.key.endswith("+") else guess_value(text)
    kind = flag.spec.kind if flag.spec is not None else "str"
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(
                f"takes no value, got {show(text)}; write it alone, or with no- in front of the engine's name"
            )
        return (text.lower() == "true") is not flag.negated
    if kind == "list":
        return list[JsonValue](words)
    structured = flag.spec is not None and flag.spec.structured and text.lstrip().startswith("{")
    read = parse_json if structured else _READERS.get(kind)
    return read(text) if read is not None else text


def guess_value(text: str) -> JsonValue:
    """A value whose type nobody states: JSON if it is JSON, else text, as vLLM reads parts of JSON flags."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _whole(text: str) -> JsonValue:
    value = whole_number(text)
    if isinstance(value, int):
        return value
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError(f"expected a whole number, got {show(text)}")
    return int(text)


def _number(text: str) -> JsonValue:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected a number, got {show(text)}")
    return number


_READERS: Mapping[str, Callable[[str], JsonValue]] = MappingProxyType(
    {"int": _whole, "float": _number, "json": parse_json}
)


def suggest(
    name: str, table: FlagTable | None, others: Sequence[str] = (), fields: Iterable[str] | None = None
) -> str | None:
    """The flag that was probably meant, among ours and the engine's, the latter also with a stage prefix.

    Args:
        name: What was written, without leading dashes.
        table: The engine's flags.
        others: Further flags of the command, without leading dashes.
        fields: Flags of the file's fields; a topology's if not given.
    """
    engine = list(table.flags) if table is not None else []
    own = [*(flags_by_name() if fields is None else fields), *others]
    for stage in Stage:
        rest = name.removeprefix(f"{stage}-")
        if rest != name:
            # The stage alone is half of a short flag, so it must not count as likeness.
            staged = [o.removeprefix(f"{stage}-") for o in own if o.startswith(f"{stage}-")]
            guess = nearest(rest, [*staged, *engine], cutoff=0.7)
            return f"--{stage}-{guess}" if guess else None
    guess = nearest(name, [*own, *engine], cutoff=0.7)
    return f"--{guess}" if guess else None
