"""What a router costs: ours, vllm-router and sglang-router in one run, in front of the same static backends.

Every request takes a prefill and a decode leg. CPU time is that of all threads and processes of the router, as the
kernel counts it; added latency is compared with the decode backend asked directly; rounds of all routers interleave,
and figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.contenders import (
    HOW_TO_GET_PEERS,
    Backends,
    Contender,
    make_peers,
    peer_versions,
    start_backends,
    start_ours,
    start_peer,
)
from benchmarks.report import Report, arguments
from benchmarks.router_load import Streams, drive

_EXAMPLES = """\
examples:
  python -m benchmarks.router --make-peers .venv-peers
  python -m benchmarks.router --peer-python .venv-peers/bin/python
  python -m benchmarks.router --quick --json
  python -m benchmarks.router --crowd-only
"""
CONNECTIONS = (1, 16, 256)
STREAMS = (32, 1000)
EVENTS_PER_S = 8_000
"""Pace of all streams together: well below what one core relays, so that events do not clump."""
OURS = "disagg"
WORKERS_OF_CROWD = 2
"""A stream takes two descriptors of its worker: 10,000 need more than the 20,000 that one process often has."""
CROWD_EVENTS, CROWD_PACE_MS = 12, 5_000
"""A minute for each stream, so that all of them are open at once for most of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    requests: int
    stream_s: float
    crowd: int
    peer_policy: str


Values = dict[str, dict[str, list[float]]]
"""By figure and router: one value per round."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start everything, measure, print."""
    assert __doc__ is not None
    parser = arguments(__doc__, _EXAMPLES)
    parser.add_argument("--peer-python", metavar="PATH", help="Python of an environment with the peers in it")
    parser.add_argument("--make-peers", metavar="FOLDER", help="make that environment, and do nothing else")
    parser.add_argument("--peer-policy", default="cache_aware", help="the peers' policy (default: %(default)s)")
    parser.add_argument("--crowd", type=int, default=10_000, help="streams held at once at the end (default: 10000)")
    parser.add_argument("--crowd-only", action="store_true", help="nothing but those streams")
    args = parser.parse_args(argv)
    if args.make_peers:
        return make_peers(args.make_peers)
    plan = _plan(args)
    report = Report("Router on static backends", ("uvloop", "httptools", "msgspec", "prometheus-client"))
    report.notes["load average"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    if args.peer_python and not args.crowd_only:
        report.peers.update(peer_versions(args.peer_python))
    uvloop.run(_run(report, plan, args.peer_python))
    report.show(as_json=args.json)
    if not (args.peer_python or args.crowd_only):
        print(HOW_TO_GET_PEERS, file=sys.stderr)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    if args.crowd_only:
        return Plan(0, 0, 0.0, args.crowd, args.peer_policy)
    if args.quick:
        return Plan(2, 2_000, 1.0, 0, args.peer_policy)
    return Plan(7, 6_000, 3.0, args.crowd, args.peer_policy)


async def _run(report: Report, plan: Plan, peer_python: str | None) -> None:
    process, backends = start_backends()
    contenders: list[Contender] = []
    try:
        if plan.rounds:
            contenders.append(await start_ours(backends))
            for name in report.peers:
                contenders += [await start_peer(name, peer_python or "", plan.peer_policy, backends)]
            _tell(report, await _rounds(contenders, backends, plan))
        if plan.crowd:
            while contenders:
                contenders.pop().stop()
            await _crowd(report, backends, plan.crowd)
    finally:
        for contender in contenders:
            contender.stop()
        process.communicate()


async def _rounds(contenders: Sequence[Contender], backends: Backends, plan: Plan) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for contender in contenders:
        await drive(contender.port, 16, 30)
    for number in range(plan.rounds):
        order = contenders if number % 2 == 0 else contenders[::-1]
        await _round(values, order, backends, plan)
    for contender in contenders:
        values["peak_memory"][contender.name].append(contender.peak_bytes() / 2**20)
    return values


async def _round(values: Values, contenders: Sequence[Contender], backends: Backends, plan: Plan) -> None:
    direct = await drive(backends.decode, 1, plan.requests // 8)
    values["p50_direct"]["backend"].append(_quantile(direct, 50))
    values["p99_direct"]["backend"].append(_quantile(direct, 99))
    for connections in CONNECTIONS:
        for c in contenders:
            share = 4 if connections == 1 else 1
            each = max(2, plan.requests // share // connections)
            before = c.cpu_s()
            seconds = await drive(c.port, connections, each)
            used = (c.cpu_s() - before) / (each * connections)
            values[f"cpu_per_request_{connections}_connections"][c.name].append(used * 1e6)
            if connections == 1:
                values["added_p50"][c.name].append(_quantile(seconds, 50) - _quantile(direct, 50))
                values["added_p99"][c.name].append(_quantile(seconds, 99) - _quantile(direct, 99))
    for streams in STREAMS:
        for c in contenders:
            values[f"cpu_per_chunk_{streams}_streams"][c.name].append(await _chunk_us(c, streams, plan.stream_s))


def _quantile(seconds: Sequence[float], percent: int) -> float:
    """In milliseconds."""
    return statistics.quantiles(seconds, n=100)[percent - 1] * 1e3


async def _chunk_us(contender: Contender, count: int, seconds: float) -> float:
    """CPU per event while all streams run: neither their beginning nor their end is counted."""
    pace_ms = max(1, round(count / EVENTS_PER_S * 1e3))
    streams = Streams(contender.port, count, 1_000_000, pace_ms)
    await streams.open()
    await streams.begun
    cpu, seen = contender.cpu_s(), streams.events
    await asyncio.sleep(seconds)
    cpu, seen = contender.cpu_s() - cpu, streams.events - seen
    if streams.errors:
        raise SystemExit(f"{contender.name} failed streams: {dict(streams.errors)}")
    await streams.leave()
    return cpu / seen * 1e6


_UNITS = {"cpu": "us", "add": "ms", "p50": "ms", "p99": "ms", "pea": "MiB"}


def _tell(report: Report, values: Values) -> None:
    for figure, by_router in values.items():
        unit = _UNITS[figure[:3]]
        medians = {}
        for name, found in by_router.items():
            label = figure if name == "backend" else f"{figure}_{name}"
            medians[name] = report.median(label, found, unit)
        for peer in report.peers:
            if peer in medians:
                report.add(f"ratio_{figure}_vs_{peer}", medians[OURS] / medians[peer], "1")


async def _crowd(report: Report, backends: Backends, count: int) -> None:
    """Hold many streams at once, from clients in several processes."""
    ours = await start_ours(backends, WORKERS_OF_CROWD)
    clients = 4
    try:
        programs = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.router_load", str(ours.port), str(count // clients)),
                *(str(CROWD_EVENTS), str(CROWD_PACE_MS)),
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(clients)
        ]
        cpu = ours.cpu_s()
        outputs = [(await program.communicate())[0] for program in programs]
        cpu = ours.cpu_s() - cpu
        peak = ours.peak_bytes()
    finally:
        ours.stop()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    report.add(f"crowd_{count}_complete", sum(r["complete"] for r in results), "streams")
    report.add(f"crowd_{count}_events", sum(r["events"] for r in results), "events")
    report.add(f"crowd_{count}_at_once", min(r["at_once"] for r in results) * clients, "streams")
    report.add(f"crowd_{count}_peak_memory", peak / 2**20, "MiB")
    report.add(f"crowd_{count}_cpu", cpu, "s")
    report.notes["router workers"] = str(WORKERS_OF_CROWD)
    errors = [r["errors"] for r in results if r["errors"]]
    if errors:
        report.notes["crowd errors"] = str(errors)


if __name__ == "__main__":
    sys.exit(main())
