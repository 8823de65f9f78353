"""`disagg project`: size prefill and decode pools analytically, with every figure explained."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from rich.console import Console

from disagg.cli.flags import CommandFlag, CommandLine, add_topology_flags, build_topology, split_command_flags
from disagg.errors import ConfigError, Problem
from disagg.project.compare import Comparison, compare
from disagg.project.figures import project
from disagg.project.report_json import as_json, comparison_as_json
from disagg.project.report_text import render, render_comparison
from disagg.project.result import Projection
from disagg.project.setup import make_setup
from disagg.topology.instances import Instance
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform, Topology

FLAGS = (
    CommandFlag("--config", takes_value=True, short="-c"),
    CommandFlag("--compare", takes_value=True),
    CommandFlag("--json"),
    CommandFlag("--help", short="-h"),
)
EXAMPLES = """\
examples:
  disagg project --model llama-3.1-70b --accelerator h100-sxm --tp 8 --input-len 2048 --output-len 256
  disagg project --model llama-3.1-70b --accelerator h100-sxm --disaggregate --prefill-tp 4 --decode-tp 8 \\
      --decode-replicas 2 --kv-transfer-bw-gbps 400 --max-concurrency 64
  disagg project --config topology.yaml --compare colocated
  disagg project --config topology.yaml --json
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if the projection could be made.

    Raises:
        ConfigError: With everything that is wrong with flags, file and catalogue.
    """
    given, words = split_command_flags(argv, FLAGS)
    if "--help" in given:
        _parser().parse_args(["--help"])
    wanted = given.get("--compare", "colocated")
    if wanted != "colocated":
        raise ConfigError([Problem("--compare", f"{wanted!r}: what can be compared with is colocated")])
    loaded = load(words, given)
    console = Console(highlight=False, soft_wrap=True)
    try:
        setup = make_setup(loaded.topology)
        if "--compare" in given:
            _show(compare(setup), console, machine="--json" in given)
        else:
            _show(project(setup), console, machine="--json" in given)
    except ConfigError as error:
        # What memory and formulas find is told like the rest: by flag, or by line of the file.
        raise ConfigError(loaded.provenance.explain(error.problems)) from error
    return 0


def _show(found: Projection | Comparison, console: Console, *, machine: bool) -> None:
    if isinstance(found, Comparison):
        if machine:
            print(json.dumps(comparison_as_json(found), indent=2))
        else:
            render_comparison(found, console)
    elif machine:
        print(json.dumps(as_json(found), indent=2))
    else:
        render(found, console)


def load(words: Sequence[str], given: Mapping[str, str | bool]) -> LoadedTopology:
    """The checked topology of a command line.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    config = given.get("--config")
    return build_topology(
        words,
        flag_tables={},
        config=config if isinstance(config, str) else None,
        auto=Platform.EMULATED,
        check=_check,
        command=CommandLine(FLAGS, sizing=True),
    )


def _check(topology: Topology, _: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
    """What the catalogue and the cost model say, so that it is told beside the topology's own problems."""
    try:
        make_setup(topology)
    except ConfigError as error:
        return list(error.problems), []
    return [], []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg project",
        description="Size prefill and decode pools analytically, with every figure explained.",
        epilog=EXAMPLES,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="topology file; flags win over it")
    parser.add_argument(
        "--compare", metavar="colocated", help="the same devices as engines that do both, side by side"
    )
    parser.add_argument("--json", action="store_true", help="print the projection for machines")
    add_topology_flags(parser, sizing=True)
    return parser
