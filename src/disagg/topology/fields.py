"""Every field of the file format as plain data, read off the specs.

Flags, error messages and the reference page are made from this list, so none of them can name a field that the
specs do not have, or describe it in other words.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from disagg.topology.spec import Stage, Topology
from disagg.topology.values import Groups, Ports


class Kind(StrEnum):
    """What a field holds, as far as reading and printing it go."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    TEXT = "text"
    CHOICE = "choice"
    PORTS = "ports"
    GROUPS = "groups"
    LIST = "list"
    MAP = "map"
    SECTION = "section"
    ENGINES = "engines"


@dataclass(frozen=True, slots=True)
class SpecField:
    """One field.

    Attributes:
        path: Its place in the file, such as ``prefill.max_num_seqs``.
        kind: What it holds.
        choices: The words that it takes, if they are few.
        expects: What a value has to be, for messages: ``a whole number from 1 to 65535``.
        optional: Whether it may be left without a value.
        required: Whether it must be given.
        default: Its value if it is not given.
        doc: Its unit and effect.
    """

    path: str
    kind: Kind
    choices: tuple[str, ...]
    expects: str
    optional: bool
    required: bool
    default: object
    doc: str

    @property
    def name(self) -> str:
        """The last word of its path."""
        return self.path.rpartition(".")[2]


@cache
def spec_fields(root: type[BaseModel] = Topology) -> Mapping[str, SpecField]:
    """All fields by path, in the order of the specs; the four pools each have their own.

    Args:
        root: The model of the whole file.
    """
    return types.MappingProxyType({f.path: f for f in _walk(root, "")})


def children(path: str, root: type[BaseModel] = Topology) -> tuple[str, ...]:
    """Names of the fields directly inside a section; of the file itself for the empty path."""
    prefix = f"{path}." if path else ""
    return tuple(f.name for f in spec_fields(root).values() if f.path == prefix + f.name)


def field_of(path: str, root: type[BaseModel] = Topology) -> SpecField | None:
    """The field that a path belongs to: its own, or the one that holds the list item or entry at the path."""
    name, _, rest = path.partition(".")
    item = _item_model(name, root) if rest.count(".") else None
    if item is not None:
        inner = spec_fields(item).get(rest.partition(".")[2])
        return replace(inner, path=path) if inner is not None else None
    while path:
        if (found := spec_fields(root).get(path)) is not None:
            return found
        path = path.rpartition(".")[0]
    return None


def item_keys(path: str, root: type[BaseModel] = Topology) -> tuple[str, ...]:
    """Names of the keys of a list's item at a path such as ``prefill.0``, if its items are mappings."""
    name, _, index = path.rpartition(".")
    item = _item_model(name, root) if index.isdigit() else None
    return tuple(item.model_fields) if item is not None else ()


def _item_model(name: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """The model of a list's items, if they are mappings."""
    info = root.model_fields.get(name)
    inner: Any = _unwrap(info)[0] if info is not None else None
    item = next(iter(get_args(inner)), None) if get_origin(inner) is tuple else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def pool_stage(path: str) -> Stage | None:
    """The stage whose pool a path lies in, if it lies in one."""
    word = path.partition(".")[0]
    return Stage(word) if word in {s.value for s in Stage} else None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[SpecField]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        inner, bounds, optional = _unwrap(info)
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        kind, choices = (Kind.SECTION, ()) if is_section else _kind(inner, info)
        yield SpecField(
            path=path,
            kind=kind,
            choices=choices,
            expects=_expects(kind, choices, bounds),
            optional=optional,
            required=info.is_required(),
            default=None if info.is_required() else info.get_default(call_default_factory=True),
            doc=" ".join((info.description or "").split()),
        )
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _walk(inner, f"{path}.")


def _unwrap(info: FieldInfo) -> tuple[Any, list[Any], bool]:
    """Take the bare type, its bounds and whether None is allowed out of an annotation."""
    annotation: Any = info.annotation
    bounds: list[Any] = list(info.metadata)
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in get_args(annotation) if a is not type(None)]
        optional = len(members) < len(get_args(annotation))
        annotation = members[0]
    while get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        for item in extra:
            bounds.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return annotation, bounds, optional


def _kind(inner: Any, info: FieldInfo) -> tuple[Kind, tuple[str, ...]]:
    if get_origin(inner) is Literal:
        return Kind.CHOICE, tuple(str(a) for a in get_args(inner))
    if isinstance(inner, type) and issubclass(inner, Enum):
        return Kind.CHOICE, tuple(str(m.value) for m in inner)
    if get_origin(inner) is tuple:
        item = get_args(inner)[0]
        if isinstance(item, type) and issubclass(item, BaseModel):
            return Kind.ENGINES, ()
        named = get_args(info.annotation)
        return (Kind.PORTS if Ports in named else Kind.GROUPS if Groups in named else Kind.LIST), ()
    if get_origin(inner) is dict:
        return Kind.MAP, ()
    simple = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT}
    return simple[inner], ()


def _expects(kind: Kind, choices: tuple[str, ...], bounds: list[Any]) -> str:
    match kind:
        case Kind.CHOICE:
            return f"one of {', '.join(choices)}"
        case Kind.INT:
            return f"a whole number{_range(bounds)}"
        case Kind.FLOAT:
            return f"a number{_range(bounds)}"
    return {
        Kind.BOOL: "true or false",
        Kind.TEXT: "text",
        Kind.PORTS: "a port from 1 to 65535, or a list of them",
        Kind.GROUPS: "a device group such as 0..15 or 0,2,4, or a list of them",
        Kind.LIST: "a text, or a list of texts",
        Kind.MAP: "a mapping of names to values",
        Kind.SECTION: "a mapping of keys to values",
        Kind.ENGINES: "a URL such as http://127.0.0.1:9900, or a list of URLs or of mappings with a url",
    }[kind]


def _range(bounds: list[Any]) -> str:
    """Bounds in words: ``from 1 to 65535``, or ``above 0 and up to 60``."""
    low = next((b.ge for b in bounds if isinstance(b, Ge)), None)
    above = next((b.gt for b in bounds if isinstance(b, Gt)), None)
    high = next((b.le for b in bounds if isinstance(b, Le)), None)
    if above is not None:
        return f" above {above}" + (f" and up to {high}" if high is not None else "")
    if low is not None:
        return f" from {low}" + (f" to {high}" if high is not None else " up")
    return ""
