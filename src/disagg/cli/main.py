"""The `disagg` console script: finds the command, maps errors to exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from disagg import __version__
from disagg.errors import DisaggError
from disagg.topology.secrets import without_password
from disagg.units import printable


class Command(Protocol):
    """A command's module: `disagg.cli.<name>`."""

    def main(self, argv: Sequence[str]) -> int:
        """Run with the words after the command's name; return the exit code."""
        ...


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """Where a command is and what it is for."""

    module: str
    summary: str


COMMANDS: dict[str, CommandInfo] = {
    "serve": CommandInfo("disagg.cli.serve", "run separate prefill and decode pools behind one OpenAI endpoint"),
    "route": CommandInfo("disagg.cli.route", "route over prefill and decode engines that are there already"),
    "keys": CommandInfo("disagg.cli.keys", "make keys for clients of the endpoint"),
    "chat": CommandInfo("disagg.cli.chat", "talk to an endpoint from the terminal"),
    "project": CommandInfo("disagg.cli.project", "size prefill and decode pools before anything is built"),
    "inference": CommandInfo("disagg.cli.project", "the same as project"),
    "models": CommandInfo("disagg.cli.models", "list the models that sizing knows, or show one"),
    "accelerators": CommandInfo("disagg.cli.accelerators", "list the devices that sizing knows, or show one"),
    "calibrate-host": CommandInfo("disagg.cli.calibrate_host", "measure this machine's processor, to size with it"),
    "emulate": CommandInfo("disagg.cli.emulate", "run emulated engines, to try a topology without devices"),
    "doctor": CommandInfo("disagg.cli.doctor", "check that this Python environment can run the engine"),
}


def usage() -> str:
    """The text of `disagg --help`."""
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {info.summary}" for name, info in COMMANDS.items()]
    return "\n".join(
        [
            "usage: disagg COMMAND [options]",
            "",
            "Disaggregated LLM serving: separate prefill and decode pools behind one OpenAI endpoint.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            "  disagg serve --model smollm2-135m-instruct --prefill-device-group 0 --decode-device-group 1",
            "  disagg serve --config topology.yaml --dry-run",
            "  disagg chat --message 'What is the capital of France?'",
            "",
            "`disagg COMMAND --help` explains a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Returns:
        0 if all went well, 2 for wrong flags or files, 130 after Ctrl-C, else the error's exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if words else 2
    if words[0] in {"-V", "--version"}:
        print(f"disagg {__version__}")
        return 0
    return run_command(words[0], words[1:])


def run_command(name: str, argv: Sequence[str]) -> int:
    """Run one command, with its errors printed as a user should see them."""
    info = COMMANDS.get(name)
    if info is None:
        near = get_close_matches(name, COMMANDS, n=1)
        advice = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}."
        print(f"disagg: no command {name!r}.{advice}", file=sys.stderr)
        return 2
    try:
        # Inside, for Ctrl-C: importing takes most of the time of a short command.
        command: Command = importlib.import_module(info.module)
        return command.main(argv)
    except DisaggError as error:
        print(printable(without_password(f"disagg {name}: {error}")), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is its right.
        sys.stderr.close()
        return 0
