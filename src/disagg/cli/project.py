"""`disagg project`: size prefill and decode pools analytically, with every figure explained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from disagg.cli.flags import CommandFlag, CommandLine, add_topology_flags, build_topology, split_command_flags
from disagg.errors import ConfigError, Problem
from disagg.project.compare import Comparison, compare
from disagg.project.explain import explain
from disagg.project.figures import project
from disagg.project.report_csv import as_csv
from disagg.project.report_json import as_json, comparison_as_json, variants_as_json
from disagg.project.report_text import render, render_comparison, render_variants
from disagg.project.sensitivity import sensitivity
from disagg.project.setup import Setup, make_setup
from disagg.topology.instances import Instance
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform, Topology

FLAGS = (
    CommandFlag("--config", takes_value=True, short="-c"),
    CommandFlag("--compare", takes_value=True),
    CommandFlag("--json"),
    CommandFlag("--csv"),
    CommandFlag("--explain", takes_value=True),
    CommandFlag("--help", short="-h"),
)
EXAMPLES = """\
examples:
  disagg project --model llama-3.1-70b --accelerator h100-sxm --tp 8 --input-len 2048 --output-len 256
  disagg project --model llama-3.1-70b --accelerator h100-sxm --disaggregate --prefill-tp 4 --decode-tp 8 \\
      --decode-replicas 2 --kv-transfer-bw-gbps 400 --max-concurrency 64
  disagg project --config topology.yaml --compare colocated
  disagg project --config topology.yaml --json            or --csv
  disagg project --config topology.yaml --explain ttft    how a figure is made, and what it rests on
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
    # In a pipe there is no width to be asked for.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    try:
        setup = make_setup(loaded.topology)
        if "--compare" in given:
            _show_both(compare(setup), console, machine="--json" in given)
        else:
            _show_one(setup, console, given)
    except ConfigError as error:
        # What memory and formulas find is told like the rest: by flag, or by line of the file.
        raise ConfigError(loaded.provenance.explain(error.problems)) from error
    return 0


def _show_one(setup: Setup, console: Console, given: Mapping[str, str | bool]) -> None:
    found = project(setup)
    name = given.get("--explain")
    if isinstance(name, str):
        console.print("\n".join(explain(found, name)), markup=False)
        return
    if "--csv" in given:
        print(as_csv(found), end="")
        return
    variants = sensitivity(setup)
    if "--json" in given:
        print(json.dumps({**as_json(found), "variants": variants_as_json(variants)}, indent=2))
    else:
        render(found, console)
        render_variants(variants, console)


def _show_both(pair: Comparison, console: Console, *, machine: bool) -> None:
    if machine:
        print(json.dumps(comparison_as_json(pair), indent=2))
    else:
        render_comparison(pair, console)


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
    parser.add_argument("--csv", action="store_true", help="print one row per figure")
    parser.add_argument("--explain", metavar="FIGURE", help="how a figure is made, its parts, and what it rests on")
    add_topology_flags(parser, sizing=True)
    return parser
