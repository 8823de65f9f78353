"""The list of an engine's flags as a data file, for vLLM and what is built on it."""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.engines.base import FlagSpec

_HUMAN_INTEGER = r"-?\d+(\.\d+)?[kKmMgGtT]?|auto"

_Kind = Literal["switch", "bool", "int", "human_int", "float", "str", "json", "json_or_str", "list"]


class _Entry(msgspec.Struct):
    kind: _Kind
    of: Literal["int", "human_int", "float", "str", "json", "json_or_str"] = "str"
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int | None, ...] = ()
    help: str = ""


class _File(msgspec.Struct):
    version: str
    flags: dict[str, _Entry]


def read_flags(text: bytes) -> tuple[str, dict[str, FlagSpec]]:
    """The version of vLLM and its flags, other long spellings included, from the list that `dump_flags` writes."""
    known = msgspec.json.decode(text, type=_File)
    flags: dict[str, FlagSpec] = {}
    for name, entry in known.flags.items():
        spec = _spec(name, entry)
        flags[name] = spec
        flags |= {alias[2:]: spec for alias in entry.aliases if alias.startswith("--")}
    return known.version, flags


def _spec(name: str, entry: _Entry) -> FlagSpec:
    choices = tuple(str(choice) for choice in entry.choices if choice is not None)
    match entry.kind:
        case "switch":
            return FlagSpec("bool", help=entry.help, twin=False)
        case "human_int":
            return FlagSpec("str", help=entry.help, pattern=_HUMAN_INTEGER)
        case "json_or_str":
            return FlagSpec("str", help=entry.help, structured=True)
        case "list":
            items = entry.of if entry.of in ("int", "float", "json") else "str"
            # LoRA modules are the one list whose items have two forms: name=path, or an object.
            return FlagSpec("list", choices, entry.help, items, structured=name == "lora-modules")
        case kind:
            return FlagSpec(kind, choices=choices, help=entry.help)
