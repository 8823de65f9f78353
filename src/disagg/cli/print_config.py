"""`--print-config`: the topology as a file that loads back to the same topology, with the source of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, JsonValue

from disagg.topology.derived import derived_values
from disagg.topology.fields import Kind, SpecField, children, pool_stage, spec_fields
from disagg.topology.instances import Instance, plan_instances, shape_name
from disagg.topology.load import LoadedTopology
from disagg.topology.secrets import masked
from disagg.topology.spec import Topology

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# Words that a YAML reader, of whatever version, might take for something else than text.
_NOT_PLAIN = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_LONG_KEY = 200


def config_yaml(loaded: LoadedTopology) -> str:
    """The topology as YAML.

    What was given stands as it is; defaults and values that follow from others are comments, so that a later
    version's defaults are not frozen into the file. Each line ends in where its value came from.
    """
    instances = plan_instances(loaded.topology)
    shape = shape_name(loaded.topology, instances)
    lines = [f"# disagg topology, {shape}. Lines in comments are defaults and what follows from other values."]
    lines.extend(_Printer(loaded, instances).section(""))
    return "\n".join(lines) + "\n"


def config_json(loaded: LoadedTopology) -> str:
    """The topology as JSON: what was given, where each value came from, and what follows from it."""
    instances = plan_instances(loaded.topology)
    printer = _Printer(loaded, instances)
    derived = derived_values(loaded, instances)
    report = {
        "topology": given_values(loaded.topology),
        "shape": shape_name(loaded.topology, instances),
        "sources": {path: str(origin) for path, origin in sorted(loaded.provenance.values.items())},
        "defaults": {
            f.path: printer.plain(f.path)
            for f in spec_fields().values()
            if printer.shows_default(f) and f.path not in derived
        },
        "derived": {path: {"value": value, "from": str(origin)} for path, (value, origin) in derived.items()},
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def given_values(topology: Topology) -> dict[str, JsonValue]:
    """What was given, as the file format has it; nothing that is a default, and no secret."""
    values: dict[str, JsonValue] = topology.model_dump(mode="json", exclude_unset=True, exclude_none=False)
    return {key: masked(key, value) for key, value in _without_none(values).items()}


def _without_none(values: dict[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    kept: dict[str, JsonValue] = {}
    for key, value in values.items():
        field = spec_fields().get(f"{prefix}{key}")
        if value is None and field is not None:
            continue
        inner = isinstance(value, dict) and field is not None and field.kind is Kind.SECTION
        kept[key] = _without_none(value, f"{prefix}{key}.") if inner and isinstance(value, dict) else value
    return kept


class _Printer:
    """Writes sections in the order of the specs."""

    def __init__(self, loaded: LoadedTopology, instances: Sequence[Instance]) -> None:
        self._loaded = loaded
        self._derived = derived_values(loaded, instances)
        self._given = given_values(loaded.topology)

    def section(self, path: str) -> Iterator[str]:
        """The lines of a section's fields; the empty path is the whole topology."""
        for name in children(path):
            field = spec_fields()[f"{path}.{name}" if path else name]
            pad = "  " * field.path.count(".")
            if field.kind is Kind.SECTION:
                yield from self._subsection(field, pad)
            elif self._is_given(field.path):
                yield from self._value(field, pad)
            else:
                yield from self._comment(field, pad)

    def shows_default(self, field: SpecField) -> bool:
        """Whether a field that was not given has a default worth showing."""
        stage = pool_stage(field.path)
        if field.kind is Kind.SECTION or (stage is not None and self._loaded.topology.pool(stage) is None):
            return False
        return not self._is_given(field.path) and self.plain(field.path) not in (None, {}, [])

    def plain(self, path: str) -> JsonValue:
        """The value in effect at a path, as JSON has it."""
        here: object = self._loaded.topology
        for part in path.split("."):
            here = getattr(here, part) if isinstance(here, BaseModel) else None
        return here  # type: ignore[return-value]  # fields hold JSON values, tuples of them or words of an enum

    def _is_given(self, path: str) -> bool:
        here: JsonValue = self._given
        for part in path.split("."):
            if not isinstance(here, dict) or part not in here:
                return False
            here = here[part]
        return True

    def _subsection(self, field: SpecField, pad: str) -> Iterator[str]:
        lines = list(self.section(field.path))
        if self._is_given(field.path):
            if any(not line.lstrip().startswith("#") for line in lines):
                yield f"{pad}{field.name}:"
            else:
                yield f"{pad}{field.name}: {{}}{self._source(field.path)}"
            yield from lines
        elif lines and self.plain(field.path) is not None:
            yield f"{pad}# {field.name}:"
            yield from lines

    def _value(self, field: SpecField, pad: str) -> Iterator[str]:
        value = self._look_up(field.path)
        if field.kind is not Kind.MAP or not isinstance(value, dict) or not value:
            yield f"{pad}{field.name}: {flow(value)}{self._source(field.path)}"
            return
        yield f"{pad}{field.name}:"
        for key, item in value.items():
            yield f"{pad}  {_key(key)}: {flow(item)}{self._source(f'{field.path}.{key}')}"

    def _comment(self, field: SpecField, pad: str) -> Iterator[str]:
        if field.path in self._derived:
            value, origin = self._derived[field.path]
            yield f"{pad}# {field.name}: {flow(value)}  # {origin}"
        elif self.shows_default(field):
            yield f"{pad}# {field.name}: {flow(self.plain(field.path))}  # default"

    def _look_up(self, path: str) -> JsonValue:
        here: JsonValue = self._given
        for part in path.split("."):
            here = here[part] if isinstance(here, dict) else None
        return here

    def _source(self, path: str) -> str:
        text = str(self._loaded.provenance.of(path))
        return "  # " + "".join(c if c.isprintable() else "?" for c in text)


def flow(value: JsonValue | tuple[JsonValue, ...]) -> str:
    """A value on one line, in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return repr(value)
    return _text(value)


def _key(text: str) -> str:
    # A YAML reader gives up on an implicit key of more than 1024 characters.
    return f"? {_text(text)} " if len(text) > _LONG_KEY else _text(text)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_PLAIN:
        return text
    # A JSON string is a YAML string, except that YAML writes characters beyond 16 bits in one escape.
    return '"' + "".join(_escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
