"""Reading a topology file so that every value knows its line.

Only what JSON can hold is accepted: text, numbers, true, false, null, lists and mappings with text keys. Words such
as `no` or `on` stay text, and `010` or `1:30` are not numbers. Everything that is wrong is collected; only a file
that is no YAML at all stops at its first error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import JsonValue

from disagg.errors import ConfigError, Problem
from disagg.topology.provenance import Origin, OriginKind, dotted

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values in a file, aliases expanded: a few lines of nested aliases can stand for billions."""
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar rules of YAML 1.2 instead of 1.1."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's own class attribute, replaced and then filled below


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"-?(?:0|[1-9][0-9]{0,24})", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)", "-0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass(frozen=True, slots=True)
class Document:
    """What a topology file holds.

    Attributes:
        name: The file's name as the user wrote it.
        data: Its mapping.
        values: Line of each value, by path.
        containers: Line of each mapping, by path.
        problems: What is wrong with the file's form, other than its being no YAML.
    """

    name: str
    data: dict[str, JsonValue]
    values: dict[str, Origin]
    containers: dict[str, Origin]
    problems: tuple[Problem, ...]


def read_yaml_file(path: str) -> Document:
    """Read a topology file.

    Raises:
        ConfigError: If there is no such file, it cannot be read, or it is not a YAML mapping.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _error(path, "no such file; --print-config writes one from flags") from None
    except IsADirectoryError:
        raise _error(path, "is a directory; name the YAML file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _error(path, f"cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise _error(path, f"is larger than {MAX_BYTES // 1024} KiB; a topology has a few kilobytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _error(
            path, f"is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}; save it as UTF-8"
        ) from None
    return read_yaml(text, name=path)


def read_yaml(text: str, *, name: str) -> Document:
    """Read a topology from YAML text.

    Args:
        text: The whole document.
        name: What problems call it.

    Raises:
        ConfigError: If it is not YAML, is empty, or is not a mapping.
    """
    try:
        _check_depth(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, name) from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _TAG + "null"):
        raise _error(name, "is empty; a topology has at least a model and a decode pool")
    if not isinstance(root, yaml.MappingNode):
        raise _error(f"{name}:{_line(root)}", f"expected a mapping of keys to values, got {_kind(root)}")
    builder = _Builder(name)
    data = builder.mapping(root, ())
    return Document(name, data, builder.values, builder.containers, tuple(builder.problems))


def _check_depth(text: str, name: str) -> None:
    """Refuse deep nesting before the composer, which recurses, meets it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark is not None else 1
                raise _error(f"{name}:{line}", f"is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _syntax_error(error: yaml.YAMLError, name: str) -> ConfigError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        context = f" {error.context}" if error.context else ""
        problem = error.problem or "it cannot be read"
        return _error(f"{name}:{mark.line + 1}", f"is not valid YAML{context}: {problem} (column {mark.column + 1})")
    return _error(name, f"is not valid YAML: {' '.join(str(error).split())}")


def _error(where: str, message: str) -> ConfigError:
    return ConfigError([Problem(where, message)])


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"the single value {node.value[:40]!r}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


@dataclass(slots=True)
class _Builder:
    """Turns composed nodes into plain values, collecting lines and problems."""

    name: str
    values: dict[str, Origin] = field(default_factory=dict)
    containers: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _count: int = 0

    def mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, JsonValue]:
        self.containers[dotted(path)] = self._origin(node)
        self._enter(node)
        record: dict[str, JsonValue] = {}
        for key, key_node, value_node in self._pairs(node, path):
            here = (*path, key)
            record[key] = self._value(value_node, here)
            if dotted(here) not in self.containers:
                self.values[dotted(here)] = self._origin(key_node)
        self._open.discard(id(node))
        return record

    def _value(self, node: yaml.Node, path: tuple[str | int, ...]) -> JsonValue:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path) if self._plain(node, "map", path) else {}
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, path) if self._plain(node, "seq", path) else []
        return self._scalar(node, path)

    def _sequence(self, node: yaml.SequenceNode, path: tuple[str | int, ...]) -> list[JsonValue]:
        self._enter(node)
        items: list[JsonValue] = []
        for index, item in enumerate(node.value):
            here = (*path, index)
            items.append(self._value(item, here))
            self.values.setdefault(dotted(here), self._origin(item))
        self._open.discard(id(node))
        return items

    def _scalar(self, node: yaml.Node, path: tuple[str | int, ...]) -> JsonValue:
        self._enter(node)
        self._open.discard(id(node))
        text = self._text(node, path)
        match node.tag.removeprefix(_TAG):
            case "str" | "merge":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "int" if re.fullmatch(r"[-+]?[0-9]{1,25}", text):
                return int(text)
            case "float" if re.fullmatch(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?", text) and text.count(".") < 2:
                number = float(text)
                if math.isfinite(number):
                    return number
        self._problem(
            node, path, f"{text[:40]!r} cannot be read as {node.tag.removeprefix(_TAG)}; quote it if it is text"
        )
        return text

    def _text(self, node: yaml.Node, path: tuple[str | int, ...]) -> str:
        """A scalar's text. JSON writes characters beyond 16 bits as two escapes; one of them alone is no text."""
        text = str(node.value)
        if text.isascii():
            return text
        units = text.encode("utf-16", "surrogatepass")
        try:
            return units.decode("utf-16")
        except UnicodeDecodeError:
            self._problem(node, path, "holds half of a surrogate pair, which is not a character")
            return units.decode("utf-16", "replace")

    def _pairs(
        self, node: yaml.MappingNode, path: tuple[str | int, ...]
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Keys and values in order; those of `<<` come last, and only where the mapping has no key of its own."""
        seen: dict[str, int] = {}
        merged: list[tuple[str, yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged.extend(self._merged(value_node, path))
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _TAG + "null":
                self._problem(key_node, path, "a key has to be a word")
                continue
            key = self._text(key_node, path)
            if key in seen:
                self._problem(key_node, (*path, key), f"is given twice, first in line {seen[key]}; remove one")
                continue
            seen[key] = _line(key_node)
            yield key, key_node, value_node
        for key, key_node, value_node in merged:
            if key not in seen:
                seen[key] = _line(key_node)
                yield key, key_node, value_node

    def _merged(self, node: yaml.Node, path: tuple[str | int, ...]) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                self._enter(source)
                yield from self._pairs(source, path)
                self._open.discard(id(source))
            else:
                self._problem(source, path, "<< takes an alias of a mapping, such as <<: *defaults")

    def _plain(self, node: yaml.Node, kind: str, path: tuple[str | int, ...]) -> bool:
        if node.tag == _TAG + kind:
            return True
        self._problem(node, path, f"tag {node.tag} is not supported; write a plain value")
        return False

    def _enter(self, node: yaml.Node) -> None:
        self._count += 1
        if id(node) in self._open:
            raise _error(f"{self.name}:{_line(node)}", "an alias refers to the value that contains it")
        if self._count > MAX_NODES:
            raise _error(self.name, f"stands for more than {MAX_NODES} values once its aliases are expanded")
        self._open.add(id(node))

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(OriginKind.FILE, f"{self.name}:{_line(node)}")

    def _problem(self, node: yaml.Node, path: tuple[str | int, ...], message: str) -> None:
        where = f"{self.name}:{_line(node)}"
        self.problems.append(Problem(f"{where}: {dotted(path)}" if path else where, message))
