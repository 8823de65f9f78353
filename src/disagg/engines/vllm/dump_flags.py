"""Write down every command-line flag of the installed vLLM: `python -m disagg.engines.vllm.dump_flags > flags.json`.

The result, `flags.json` beside this file, lets the launcher check engine flags where vLLM is not installed.
It is made again for each supported vLLM version. Per flag, without the leading dashes:

- `kind`: what follows the flag.
    - nothing: `switch`, or `bool`, which also has a twin `--no-<flag>`
    - one value: `int`, `human_int` (also 16k, 1M or, for some, auto), `float`, `str`, `json`, `json_or_str`
    - one or several values: `list`; its `of` is the kind of an item
- `aliases`: other spellings, dashes included (left out when there are none; so are the following)
- `choices`: the accepted values
- `repeatable`: each use adds a value
- `value_optional`: the flag may stand alone
- `deprecated`: vLLM says so
- `help`: the first sentence of vLLM's help

A `json` flag may also be given in parts, `--flag.key.subkey value`, and vLLM accepts `_` for `-` in any name.
"""

import argparse
import contextlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from typing import Any

HELP_LIMIT = 120

_KINDS = {
    "int": "int",
    "float": "float",
    "str": "str",
    "loads": "json",
    "parse_dataclass": "json",
    "union_dict_and_str": "json_or_str",
    "human_readable_int": "human_int",
    "human_readable_int_or_auto": "human_int",
}
"""The functions that vLLM's parser converts values with, by name."""

_WRAPPERS = ("_optional_type", "_parse_type")
"""Functions that add "None" or an error message to another converter, which they keep as `return_type`."""


def describe(action: argparse.Action, *, deprecated: bool = False) -> tuple[str, dict[str, Any]]:
    """Return a flag's name and its entry."""
    long = [option for option in action.option_strings if option.startswith("--")]
    name = long[0]
    twin = f"--no-{name[2:]}" if isinstance(action, argparse.BooleanOptionalAction) else None
    kind = "bool" if twin else "switch" if action.nargs == 0 else _value_kind(action.type)
    several = action.nargs in ("+", "*")
    entry: dict[str, Any] = {"kind": "list", "of": kind} if several else {"kind": kind}
    optional = {
        "aliases": [option for option in action.option_strings if option not in (name, twin)],
        "choices": list(action.choices or ()),
        "repeatable": type(action).__name__ == "_AppendAction",
        "value_optional": action.nargs == "?",
        "deprecated": deprecated,
        "help": first_sentence(action.help or ""),
    }
    return name[2:], entry | {key: value for key, value in optional.items() if value}


def first_sentence(text: str, limit: int = HELP_LIMIT) -> str:
    """Return the first sentence of a help text on one line, cut at a word with an ellipsis if it is too long."""
    prose = re.sub(r"^API docs: \S+", "", text.strip())
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\. ", " ".join(prose.split()))[0].rstrip(".:")
    if len(sentence) <= limit:
        return sentence
    return sentence[: limit - 1].rsplit(" ", 1)[0] + "…"


def render(version: str, flags: dict[str, dict[str, Any]]) -> str:
    """Render as JSON with one flag per line, so that two versions can be compared line by line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(flags[name], ensure_ascii=False)}" for name in sorted(flags)]
    return f'{{"version": {json.dumps(version)}, "flags": {{\n' + ",\n".join(lines) + "\n}}"


def _value_kind(converter: Callable[[str], Any] | argparse.FileType | str | None) -> str:
    if not inspect.isfunction(converter):
        return _KINDS.get(getattr(converter, "__name__", "str"), "str")
    if converter.__name__ in _WRAPPERS:
        return _value_kind(inspect.getclosurevars(converter).nonlocals["return_type"])
    return _KINDS.get(converter.__name__, "str")


def main() -> None:
    """Print the flags of the API server's parser."""
    # vLLM builds the help texts only if it is about to print them, which it tells from this at import.
    sys.argv.append("--help")
    # It also logs to stdout while it is imported; stdout is for the JSON alone.
    with contextlib.redirect_stdout(sys.stderr):
        import vllm
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
    flags = dict(
        describe(action, deprecated=action in getattr(parser, "_deprecated", ()))
        for action in parser._actions  # argparse has no public way to list them
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    )
    sys.stdout.write(render(vllm.__version__, flags) + "\n")


if __name__ == "__main__":
    main()
