"""`disagg serve`: run separate pools of engines behind one OpenAI endpoint, or show what would run."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from disagg.cli.flags import CommandFlag, CommandLine, add_topology_flags, build_topology, split_command_flags
from disagg.cli.print_config import config_json, config_yaml
from disagg.engines.base import FlagTable
from disagg.engines.registry import ENGINE_OF, adapter_for
from disagg.errors import ConfigError, Problem
from disagg.launch.checkpoint import planned_model, resolve_model
from disagg.launch.machine import detect_platform
from disagg.router.keys import key_problems
from disagg.serve import Ui, describe, render_json, render_table, run
from disagg.topology.instances import Instance
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform, Topology

FLAGS = (
    CommandFlag("--config", takes_value=True, short="-c"),
    CommandFlag("--print-config"),
    CommandFlag("--dry-run"),
    CommandFlag("--json"),
    CommandFlag("--start-timeout", takes_value=True),
    CommandFlag("--help", short="-h"),
)
EXAMPLES = """\
examples:
  disagg serve --model smollm2-135m-instruct --prefill-device-group 0 --decode-device-group 1
  disagg serve --config topology.yaml
  disagg serve --config topology.yaml --dry-run           every process that would start; nothing is started
  disagg serve --model MODEL --prefill-replicas 2 --decode-replicas 2 --print-config > topology.yaml
  disagg serve --model m --platform emulated --prefill-replicas 4 --decode-replicas 4    no devices needed
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 after an orderly stop, 130 if it was interrupted before it was ready.

    Raises:
        ConfigError: With everything that is wrong with flags, file and machine.
        LaunchError: If the deployment does not start.
    """
    given, words = split_command_flags(argv, FLAGS)
    if "--help" in given:
        # argparse prints the page and leaves with code 0, as every other command does.
        _parser().parse_args(["--help"])
    limit_s = _seconds(given.get("--start-timeout"))
    loaded = load(words, given)
    notices = Console(stderr=True, highlight=False, soft_wrap=True)
    if "--print-config" in given:
        _warn(loaded, notices)
        print(config_json(loaded) if "--json" in given else config_yaml(loaded), end="")
        return 0
    topology = loaded.resolved()
    adapter = adapter_for(loaded.platform)
    if "--dry-run" in given:
        plan = describe(topology, adapter, _model(topology, dry=True))
        if "--json" in given:
            print(render_json(plan, loaded.warnings))
        else:
            Console(highlight=False, soft_wrap=True).print(render_table(plan, loaded.warnings))
        return 0
    _warn(loaded, notices)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    ui = Ui(start_timeout_s=limit_s, explain=loaded.provenance.explain)
    return run(topology, adapter, _model(topology, dry=False), ui)


def load(words: Sequence[str], given: Mapping[str, str | bool]) -> LoadedTopology:
    """The checked topology of a command line.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    tables: dict[Platform, FlagTable] = {p: adapter_for(p).flag_table() for p in ENGINE_OF}
    config = given.get("--config")
    return build_topology(
        words,
        flag_tables=tables,
        config=config if isinstance(config, str) else None,
        auto=detect_platform(),
        check=_engine_check,
        command=CommandLine(FLAGS),
    )


def _engine_check(topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
    errors, warnings = adapter_for(topology.platform).check(topology, instances)
    return [*errors, *key_problems(topology.router)], list(warnings)


def _model(topology: Topology, *, dry: bool) -> str:
    """The model string for the engines, made ready unless this is a dry run."""
    if topology.platform is Platform.EMULATED:
        return topology.model
    if dry:
        return planned_model(topology.model)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"preparing {topology.model}", total=1.0)
        return resolve_model(
            topology.model,
            on_progress=lambda phase, done: bar.update(task, description=phase, completed=done),
        )


def _warn(loaded: LoadedTopology, console: Console) -> None:
    for problem in loaded.warnings:
        console.print(f"warning: {problem}", style="yellow", markup=False)


def _seconds(value: str | bool | None) -> float | None:
    if not isinstance(value, str):
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError([Problem("--start-timeout", f"{value!r} is not a number of seconds from 1 to 86400")])
    return seconds


def _parser() -> argparse.ArgumentParser:
    """Documents the flags; they are read by `build_topology`, which reports all mistakes at once."""
    parser = argparse.ArgumentParser(
        prog="disagg serve",
        usage="disagg serve [--config FILE] [flags]",
        description="Run separate encode, prefill and decode pools behind one OpenAI-compatible endpoint.",
        epilog=EXAMPLES,
    )
    command = parser.add_argument_group("command")
    command.add_argument("--config", "-c", metavar="FILE", help="topology file; flags win over it")
    command.add_argument("--print-config", action="store_true", help="print the topology as a file, and stop")
    command.add_argument("--dry-run", action="store_true", help="print every process that would start, and stop")
    command.add_argument("--json", action="store_true", help="with --print-config or --dry-run: print JSON")
    command.add_argument("--start-timeout", metavar="SECONDS", help="the longest start of an instance")
    add_topology_flags(parser)
    return parser
