"""Checking engine flags that users pass through: known, not ours to set, and of the right kind."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping

from pydantic import JsonValue

from disagg.engines.base import FlagSpec, FlagTable
from disagg.units import comma_list

_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "one word or number",
    "json": "a JSON object or array",
    "list": "a list",
}


def base_name(name: str) -> str:
    """The flag that a dotted name belongs to: ``compilation-config.mode`` sets a part of ``compilation-config``."""
    return name.partition(".")[0]


def flag_problem(table: FlagTable, name: str, value: JsonValue, *, allow_unknown: bool) -> str | None:
    """What is wrong with one flag and its value, a sentence; None if the engine will take it.

    Args:
        table: The engine's flags.
        name: The flag without leading dashes, words separated by dashes.
        value: Its value; null leaves the flag to the engine's default.
        allow_unknown: Whether a flag that the table does not have may pass.
    """
    flag = base_name(name)
    reserved = _reserved(table.reserved, flag, flag in table.flags)
    if reserved is not None:
        return f"--{flag} is set by disagg; {reserved}"
    spec = table.flags.get(flag)
    if spec is None:
        return None if allow_unknown else _unknown(table, flag)
    if value is None or flag != name:
        return None  # left out, or a part of a JSON flag, whose type only the engine knows
    return value_problem(spec, value)


def value_problem(spec: FlagSpec, value: JsonValue) -> str | None:
    """Why a value does not fit a flag, a sentence; None if it does."""
    if spec.kind == "bool" and value is False and not spec.twin:
        return "it can only be switched on; leave it out"
    if not _fits(spec, value):
        return f"{json.dumps(value)} is not {_EXPECTED[spec.kind]}"
    words = [_text(item) for item in (value if isinstance(value, list) else [value])]
    if spec.choices and spec.kind != "bool":
        wrong = [word for word in words if word not in spec.choices]
        if wrong:
            near = difflib.get_close_matches(wrong[0], spec.choices, n=1)
            shown = f"did you mean {near[0]}?" if near else f"choose one of {comma_list(spec.choices)}"
            return f"{wrong[0]} is not one of its values; {shown}"
    if spec.pattern and re.fullmatch(spec.pattern, words[0]) is None:
        return f"{words[0]} is not a value that it takes"
    return None


def _fits(spec: FlagSpec, value: JsonValue) -> bool:
    match spec.kind:
        case "bool":
            return isinstance(value, bool)
        case "list":
            items = value if isinstance(value, list) else [value]
            structured = dict if spec.structured else ()
            return bool(items) and all(
                _scalar_fits(spec.items, item) or isinstance(item, structured) for item in items
            )
        case "str":
            return _scalar_fits("str", value) or (spec.structured and isinstance(value, dict))
        case kind:
            return _scalar_fits(kind, value)


def _scalar_fits(kind: str, value: JsonValue) -> bool:
    if kind == "json":
        return isinstance(value, dict | list) or (isinstance(value, str) and _is_json(value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    if kind == "int":
        return isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value) is not None)
    if kind == "float":
        return not isinstance(value, str) or _is_number(value)
    return True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _reserved(reserved: Mapping[str, str], flag: str, known: bool) -> str | None:
    if flag in reserved:
        return reserved[flag]
    if known or not flag:
        return None
    # An argument parser completes unique beginnings, so a shortened name would reach the reserved flag.
    for name, instead in reserved.items():
        if name.startswith(flag) or f"no-{name}".startswith(flag):
            return instead
    return None


def _unknown(table: FlagTable, flag: str) -> str:
    near = difflib.get_close_matches(flag, table.flags, n=1)
    guess = f" Did you mean --{near[0]}?" if near else ""
    if flag.startswith("no-") and flag[3:] in table.flags:
        guess = f" Write {flag[3:]}: false."
    return f"{table.engine} has no flag --{flag}.{guess} To pass it all the same, set allow_unknown_engine_args."
