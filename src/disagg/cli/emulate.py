"""`disagg emulate`: emulated engines in one process, to try a topology or a client without devices."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import uuid4

from disagg.cli.emulate_topology import lay_out, write_route_file
from disagg.cli.flags import CommandFlag, split_command_flags
from disagg.engines.emulated import host
from disagg.engines.emulated.arguments import add_engine_arguments, engine_faults, engine_pace, engine_settings
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.errors import ConfigError, Problem
from disagg.units import MAX_PORT

_MAX_INSTANCES = 1000
FLAGS = (
    CommandFlag("--config", takes_value=True, short="-c"),
    CommandFlag("--route-file", takes_value=True),
    CommandFlag("--help", short="-h"),
)
EXAMPLES = """\
examples:
  disagg emulate
  disagg emulate --instances 4 --port 9800
  disagg emulate --port 9900 --role producer --prefill-tokens-per-s 5000
  disagg emulate --port 9800 --role consumer --decode-step 0.02 --kv-load-failure-policy recompute
  disagg emulate --fault '{"delay_s": 2}'
  disagg emulate --config topology.yaml --route-file route.yaml --decode-step 0.02

An instance answers as vLLM does, with toy text that depends on the KV that it really read. While it runs, tests can
ask it for GET /emulated/state and tell it POST /emulated/faults, freeze, thaw, crash and restart.
To run a whole topology of emulated engines behind the router: disagg serve --platform emulated ...
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 after Ctrl-C, 1 if every engine died."""
    given, words = split_command_flags(argv, FLAGS)
    config = given.get("--config")
    if isinstance(config, str) and "--help" not in given:
        route_file = given.get("--route-file")
        return _run_topology(config, words, route_file if isinstance(route_file, str) else None)
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    settings, pace, faults = engine_settings(args), engine_pace(args), engine_faults(args)
    where = _addresses(args)

    def make(died: Callable[[], None]) -> list[Instance]:
        return [
            Instance(
                replace(settings, engine_id=str(uuid4()), kv_events=settings.kv_events.numbered(number)),
                pace,
                address,
                faults=faults,
                on_death=died,
            )
            for number, address in enumerate(where)
        ]

    return host.run(host.serve(make, _show))


def _run_topology(config: str, words: Sequence[str], route_file: str | None) -> int:
    """Run all instances of a topology."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    layout = lay_out(config, words)
    for problem in layout.warnings:
        print(f"warning: {problem}", file=sys.stderr)

    def ready(instances: Sequence[Instance]) -> None:
        print(f"{layout.deployment.shape} of {layout.deployment.model}, emulated; Ctrl-C stops")
        for name, instance in zip(layout.names(), instances, strict=True):
            print(f"  {name:<12} {instance.url}")
        if route_file is not None:
            write_route_file(route_file, layout, instances)
            print(f"to route to them: disagg route --config {route_file}", flush=True)

    return host.run(host.serve(lambda died: [engine.instance(died) for engine in layout.engines], ready))


def _show(instances: Sequence[Instance]) -> None:
    settings = instances[0].settings
    print(f"{settings.role} of {settings.served_model_names[0]}, {settings.num_blocks} KV blocks each; Ctrl-C stops")
    for instance in instances:
        side = f"  KV on port {instance.addresses.side_channel_port}" if settings.role != "none" else ""
        print(f"  {instance.url}{side}", flush=True)


def _addresses(args: argparse.Namespace) -> list[Addresses]:
    """One per instance, counted up; port 0 leaves the choice to the system.

    Raises:
        ConfigError: If there are too few ports, or none.
    """
    problems = []
    if args.route_file:
        problems.append(Problem("--route-file", "it describes a topology; give that with --config"))
    if not 1 <= args.instances <= _MAX_INSTANCES:
        told = f"{args.instances} is not a number of engines in one process; give one from 1 to {_MAX_INSTANCES}"
        problems.append(Problem("--instances", told))
    for flag, first in (
        ("--port", args.port),
        ("--side-channel-port", args.side_channel_port),
        ("--bootstrap-port", args.bootstrap_port),
    ):
        last = first + args.instances - 1 if first else 0
        if not 0 <= first <= MAX_PORT or last > MAX_PORT:
            problems.append(Problem(flag, f"{args.instances} ports from {first} do not fit into 1 to {MAX_PORT}"))
    if problems:
        raise ConfigError(problems)
    return [
        Addresses(
            args.host,
            _nth(args.port, n),
            args.side_channel_host,
            _nth(args.side_channel_port, n),
            _nth(args.bootstrap_port, n),
        )
        for n in range(args.instances)
    ]


def _nth(first: int, index: int) -> int:
    return first + index if first else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg emulate",
        description="Run emulated engines: vLLM's API and KV handoff, a toy instead of a model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="engines in this process (default: 1)")
    parser.add_argument("--port", type=int, default=9800, help="first HTTP port, 0: free ones (default: %(default)s)")
    parser.add_argument("--config", "-c", metavar="FILE", help="run every instance of this topology file instead")
    parser.add_argument(
        "--route-file", metavar="FILE", help="with --config: write a file for disagg route --config FILE"
    )
    parser.add_argument(
        "--bootstrap-port", type=int, default=8998, metavar="PORT", help="first bootstrap port (default: %(default)s)"
    )
    parser.add_argument(
        "--side-channel-port", type=int, default=5600, metavar="PORT", help="first KV port (default: %(default)s)"
    )
    add_engine_arguments(parser)
    return parser
