"""Hours in minutes: mixed load with faults on a router in a process of its own, and what that does to its memory.

`python -m benchmarks.soak` takes ten minutes, `--quick` 45 seconds. Engines are emulated, in this process; they
crash, freeze, restart and fail, and clients leave or read slowly. The router is `disagg route`, which gets to know
all of this only from its own health checks. Printed are the slope of its memory after a warm-up of a quarter, its
descriptors before and after, and how every request ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import Role, SimplePace
from disagg.router.fleet import Fleet
from disagg.topology.spec import Stage
from tests.support.client import Ending, ask
from tests.support.cluster import MODEL, SETTINGS, Node, low_port
from tests.support.storm import ENGINE_FAULTS, plan_asks
from tests.support.wire import metric

CLIENTS = 12
KINDS = ("crash", "freeze", *ENGINE_FAULTS)


@dataclass
class Soak:
    """What was seen.

    Attributes:
        memory: Seconds since the start and resident MiB of the router.
        endings: How requests ended.
        problems: Answers of a form that is never right.
    """

    memory: list[tuple[float, float]] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    descriptors: tuple[int, int] = (0, 0)
    counted: float = 0.0
    still_open: float = 0.0

    def slope(self) -> float:
        """MiB per hour by least squares, without the first quarter."""
        points = self.memory[len(self.memory) // 4 :]
        mean_t = sum(t for t, _ in points) / len(points)
        mean_m = sum(m for _, m in points) / len(points)
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        return 3600 * sum((t - mean_t) * (m - mean_m) for t, m in points) / spread if spread else 0.0

    def report(self) -> dict[str, object]:
        """The figures, as JSON and the table show them."""
        quarter = self.memory[len(self.memory) // 4 :]
        return {
            "seconds": round(self.memory[-1][0], 1),
            "requests": sum(self.endings.values()),
            "endings": {str(k): v for k, v in sorted(self.endings.items())},
            "counted_by_router": int(self.counted),
            "faults": dict(sorted(self.faults.items())),
            "malformed_answers": len(self.problems),
            "rss_mib_after_warm_up": round(quarter[0][1], 1),
            "rss_mib_at_end": round(quarter[-1][1], 1),
            "slope_mib_per_hour": round(self.slope(), 2),
            "descriptors_before": self.descriptors[0],
            "descriptors_after": self.descriptors[1],
            "in_flight_at_end": int(self.still_open),
        }

    def is_good(self) -> bool:
        """Whether everything is accounted for; memory is for people to judge."""
        before, after = self.descriptors
        whole = self.counted == sum(self.endings.values()) and not self.still_open
        return whole and after <= before and not self.problems and not self.endings[Ending.CUT]


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def page(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\n\r\n".encode())
    raw = await reader.read()
    writer.close()
    return raw.decode()


@asynccontextmanager
async def engines() -> AsyncIterator[list[Node]]:
    """Two prefill and two decode engines on ports that they keep."""
    settings = replace(SETTINGS, num_blocks=4096, lease_s=5.0)
    nodes = []
    for stage, role in ((Stage.PREFILL, Role.PRODUCER), (Stage.DECODE, Role.CONSUMER)):
        for number in range(2):
            name = f"{stage}-{number}"
            where = Addresses("127.0.0.1", low_port(), "127.0.0.1", low_port())
            instance = Instance(replace(settings, role=role, engine_id=name), SimplePace(200_000, 0.002), where)
            nodes.append(Node(name, stage, instance, Fleet(())))
    for node in nodes:
        await node.start(told=False)
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.crash(told=False)


@asynccontextmanager
async def router(nodes: Sequence[Node], port: int) -> AsyncIterator[Process]:
    """`disagg route` over the engines, ready."""
    urls = {s: [n.instance.url for n in nodes if n.stage is s] for s in (Stage.PREFILL, Stage.DECODE)}
    flags = [
        *("--model", MODEL, "--engine", "emulated", "--port", str(port), "--lease-s", "5"),
        *("--prefill", *urls[Stage.PREFILL], "--decode", *urls[Stage.DECODE]),
        *("--health-interval-s", "0.5", "--first-token-timeout-s", "2", "--idle-timeout-s", "2"),
        *("--prefill-timeout-s", "2", "--request-timeout-s", "10"),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "disagg", "route", *flags), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                if " 200 " in (await page(port, "/health")).split("\r\n")[0]:
                    break
            if process.returncode is not None or time.monotonic() > deadline:
                raise SystemExit("the router did not become ready")
            await asyncio.sleep(0.1)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def load(port: int, soak: Soak, over: asyncio.Event, number: int) -> None:
    rng = random.Random(number)
    while not over.is_set():
        for what in plan_asks(rng, 20):
            result = await ask(port, what)
            soak.endings[result.ending] += 1
            if result.problems:
                soak.problems.append(str(result))
            if over.is_set():
                return


async def strike(nodes: Sequence[Node], soak: Soak, over: asyncio.Event) -> None:
    """One fault after the other, each on one engine, and a while without any."""
    rng = random.Random(0)
    while not over.is_set():
        node, kind = rng.choice(nodes), rng.choice(KINDS)
        soak.faults[kind] += 1
        if kind == "crash":
            await node.crash(told=False)
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            await node.start(told=False)
        elif kind == "freeze":
            node.freeze()
            await asyncio.sleep(0.5)
            node.thaw()
        else:
            node.fault(**ENGINE_FAULTS[kind])
            await asyncio.sleep(1.0)
            node.fault()
        await asyncio.sleep(rng.uniform(0.5, 1.5))


async def run(seconds: float) -> Soak:
    soak = Soak()
    port = low_port()
    async with engines() as nodes, router(nodes, port) as process:
        # Connections of health checks are kept, so they belong to the state before.
        await asyncio.sleep(3)
        before = descriptors(process.pid)
        over = asyncio.Event()
        began = time.monotonic()
        tasks = [asyncio.create_task(load(port, soak, over, n)) for n in range(CLIENTS)]
        tasks.append(asyncio.create_task(strike(nodes, soak, over)))
        while (passed := time.monotonic() - began) < seconds:
            soak.memory.append((passed, resident_mib(process.pid)))
            await asyncio.sleep(min(2.0, seconds / 20))
        over.set()
        await asyncio.gather(*tasks)
        for _ in range(20):
            await asyncio.sleep(1)
            text = await page(port, "/metrics")
            soak.descriptors = (before, descriptors(process.pid))
            soak.counted = metric(text, "disagg_requests_total")
            soak.still_open = metric(text, "disagg_requests_in_flight") + metric(text, "disagg_legs_in_flight")
            if soak.is_good():
                break
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="45 seconds instead of ten minutes")
    parser.add_argument("--seconds", type=float, help="another duration")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    soak = uvloop.run(run(options.seconds or (45.0 if options.quick else 600.0)))
    report = soak.report()
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:24} {value}")
    for problem in soak.problems[:5]:
        print(problem, file=sys.stderr)
    return 0 if soak.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
