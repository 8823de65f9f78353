"""What pydantic found, in the words of someone who writes flags or YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from disagg.errors import Problem
from disagg.topology.fields import Kind, children, field_of, item_keys, spec_fields
from disagg.topology.provenance import dotted
from disagg.topology.spec import Topology
from disagg.units import comma_list

_ENTRY_EXPECTS: Mapping[Kind, str] = {
    Kind.PORTS: "a port from 1 to 65535",
    Kind.GROUPS: "a device group such as 0..15 or 0,2,4",
    Kind.LIST: "a text",
    Kind.ENGINES: "a URL such as http://127.0.0.1:9900, or a mapping with a url",
}
_NAME_RULES: Mapping[str, str] = {
    "env": "is no name of an environment variable; names have letters, digits and _",
    "engine_args": "is no name of an engine flag; write it as the engine does, without the leading dashes",
}


def nearest(word: str, known: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that was probably meant, or None."""
    found = get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return found[0] if found else None


def show(value: object) -> str:
    """A value as a message quotes it: short, and telling text from numbers."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return (
            f"{value if len(value) <= 60 else value[:57] + '...'!r}" if len(value) <= 60 else repr(value[:57] + "...")
        )
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return str(value)


def translate(error: ValidationError, root: type[BaseModel] = Topology) -> list[Problem]:
    """Each thing that the specs refused, at its dotted path.

    Args:
        error: From the model of the whole file.
        root: That model.
    """
    details = error.errors(include_url=False)
    # A list whose items were all refused is then also called too short, whatever was wrong inside them.
    bad_items = {detail["loc"][:depth] for detail in details for depth in range(1, len(detail["loc"]))}
    return [_translate(d, root) for d in details if d["type"] != "too_short" or d["loc"] not in bad_items]


def _translate(detail: ErrorDetails, root: type[BaseModel]) -> Problem:
    # pydantic marks an error in a key of a mapping with a last element "[key]".
    in_key = detail["loc"][-1:] == ("[key]",)
    loc = detail["loc"][:-1] if in_key else detail["loc"]
    path = dotted(loc)
    if in_key:
        rule = next((text for word, text in _NAME_RULES.items() if word in loc), "is no valid name")
        return Problem(path, f"{str(loc[-1])!r} {rule}")
    return Problem(path, _message(path, detail, root))


def _message(path: str, detail: ErrorDetails, root: type[BaseModel]) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return unknown_key(path, root)
        case "value_error":
            return str(detail.get("ctx", {}).get("error", detail["msg"]))
        case "missing":
            return "is required"
        case "too_short":
            return "is an empty list; give at least one, or remove it"
        case "string_too_short":
            return "must not be empty"
    return empty_message(path, root) if detail["input"] is None else _expected(path, detail, root)


def _expected(path: str, detail: ErrorDetails, root: type[BaseModel]) -> str:
    field = field_of(path, root)
    if field is None:
        return detail["msg"]
    value = detail["input"]
    if field.path == path:
        expects = field.expects
    elif field.kind is Kind.MAP:
        expects = "text; put quotes around it" if field.name == "env" else "a value that JSON can hold"
    else:
        expects = _ENTRY_EXPECTS.get(field.kind, field.expects)
    message = f"expected {expects}, got {show(value)}"
    guess = nearest(str(value), field.choices) if field.kind is Kind.CHOICE and isinstance(value, str) else None
    return f"{message}; did you mean {guess}?" if guess else message


def empty_message(path: str, root: type[BaseModel] = Topology) -> str:
    """Say that a key has no value, and what to do about it."""
    field = spec_fields(root).get(path)
    if field is None:
        return "has no value"
    if field.kind is Kind.SECTION:
        return "is empty; remove it, or write {} for one with default values"
    if field.required:
        return f"is required; expected {field.expects}"
    return f"has no value; expected {field.expects}, or remove it for the default"


def unknown_key(path: str, root: type[BaseModel] = Topology) -> str:
    """Say that a key is unknown, and which known one was probably meant."""
    parent, _, name = path.rpartition(".")
    known = children(parent, root) or item_keys(parent, root)
    guess = nearest(name.replace("-", "_"), known)
    place = f"key of {parent}" if parent else "key"
    if guess is not None:
        return f"unknown {place}; did you mean {guess}?"
    elsewhere = sorted({f.path for f in spec_fields(root).values() if f.name == name})
    if elsewhere:
        return f"unknown {place}; it exists as {comma_list(elsewhere[:4])}"
    return f"unknown {place}; known are {comma_list(known)}"
