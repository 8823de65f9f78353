"""`disagg route`: a router in front of engines that somebody else started."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence

from rich.console import Console

from disagg.cli.flags import CommandFlag, document_flag, split_command_flags
from disagg.cli.flags_scan import FlagScan
from disagg.cli.print_route import plan_lines, route_json, route_yaml
from disagg.errors import ConfigError, Problem
from disagg.router.keys import key_problems
from disagg.serve.routing import Source, route
from disagg.topology.flags import flag_table, flags_by_name
from disagg.topology.fleet_file import FleetFile, LoadedFleet, load_fleet
from disagg.topology.yaml_source import Document, read_yaml_file

FLAGS = (
    CommandFlag("--config", takes_value=True, short="-c"),
    CommandFlag("--print-config"),
    CommandFlag("--dry-run"),
    CommandFlag("--json"),
    CommandFlag("--help", short="-h"),
)
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
EXAMPLES = """\
examples:
  disagg route --model MODEL --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200,http://10.0.0.3:8200
  disagg route --model MODEL --engine sglang --prefill http://10.0.0.1:30000 8998 --decode http://10.0.0.2:30000
  disagg route --config route.yaml                        read again when it changes, and on SIGHUP
  disagg route --config route.yaml --port 9000 --dry-run  what would be routed where; nothing is started

A number behind a URL is the engine's bootstrap port. Every flag is a key of the file; flags win over the file.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 after an orderly stop.

    Raises:
        ConfigError: With everything that is wrong with flags and file.
        PreparationError: If the address cannot be bound.
    """
    given, words = split_command_flags(argv, FLAGS)
    if "--help" in given:
        # argparse prints the page and leaves with code 0, as every other command does.
        _parser().parse_args(["--help"])
    config = given.get("--config")
    path = config if isinstance(config, str) else None
    loaded = load(words, path)
    if "--print-config" in given:
        print(route_json(loaded) if "--json" in given else route_yaml(loaded), end="")
        return 0
    if "--dry-run" in given:
        lines = plan_lines(loaded.file)
        print(json.dumps({"plan": lines}) if "--json" in given else "\n".join(lines))
        return 0
    level = _LEVELS[min(loaded.file.verbosity, len(_LEVELS) - 1)]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("disagg").setLevel(level)
    return route(loaded.file, Source(path, lambda: load(words, path), Console(highlight=False)))


def load(words: Sequence[str], path: str | None) -> LoadedFleet:
    """The checked fleet of a command line.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    scan = FlagScan(None, others=tuple(f.name.lstrip("-") for f in FLAGS), own=flags_by_name(FleetFile))
    scan.run(words)
    document: Document | None = None
    if path is not None:
        try:
            document = read_yaml_file(path)
        except ConfigError as error:
            raise ConfigError([*error.problems, *scan.errors]) from error
    elif not scan.settings and not scan.errors:
        raise ConfigError(
            [Problem("--config", "name a file, or the engines: --prefill URL --decode URL --model NAME")]
        )
    return load_fleet(document, scan.settings, scan.errors, key_problems)


def _parser() -> argparse.ArgumentParser:
    """Documents the flags; they are read by `load`, which reports all mistakes at once."""
    parser = argparse.ArgumentParser(
        prog="disagg route",
        usage="disagg route [--config FILE] [flags]",
        description="Route requests over prefill and decode engines that somebody else started.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command = parser.add_argument_group("command")
    command.add_argument("--config", "-c", metavar="FILE", help="fleet file; flags win over it")
    command.add_argument("--print-config", action="store_true", help="print the fleet as a file, and stop")
    command.add_argument("--dry-run", action="store_true", help="print what would be routed where, and stop")
    command.add_argument("--json", action="store_true", help="with --print-config or --dry-run: print JSON")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in flag_table(FleetFile):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        document_flag(groups[flag.group], flag, [f"--{name}" for name in flag.names])
    groups["deployment"].add_argument("-v", dest="verbosity", action="count", help="The same, by repetition.")
    return parser
