"""How long it takes to price steps: one at a time, and a sweep of 10,000 points on one core; and how long the command
takes to start.

Limits: 1 ms per point of a sweep, 0.5 s to start. Times are the best of several runs, as anything else that a
machine does only adds.

Run: python -m benchmarks.projection_speed [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.models import find_model
from disagg.cost.plan import Replica, Shape
from disagg.cost.prefill import prefill
from disagg.cost.step import StepModel
from disagg.cost.work import decode_work

POINTS = 10_000
START = "import sys; from disagg.cli.main import main; sys.exit(main())"
CASES = {
    "llama-3.1-70b, 4 ranks": ("llama-3.1-70b", Shape(4)),
    "deepseek-v3, 8 attention groups and expert ranks": ("deepseek-v3", Shape(8, expert=8, attention_data=8)),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One measured thing."""

    what: str
    seconds: float
    limit: float | None


def best(run: Callable[[], object], times: int) -> float:
    """Shortest time of some runs."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def lines() -> list[Line]:
    """Everything that is measured."""
    found = []
    for name, (model, shape) in CASES.items():
        step = StepModel(Replica(find_model(model), find_accelerator("h100-sxm"), shape))
        sweep = decode_work(np.linspace(1, 512, POINTS), np.linspace(100, 30_000, POINTS))
        one = decode_work(np.asarray(7.0), np.asarray(2000.0))
        prompts, length = np.ones(POINTS), np.linspace(100, 16_000, POINTS)
        decode_seconds = best(lambda m=step, w=sweep: m.price(w), 5) / POINTS  # type: ignore[misc]
        found.append(Line(f"decode step, {name}: per point of a sweep", decode_seconds, 1e-3))
        prompt_seconds = best(lambda m=step, p=prompts, n=length: prefill(m, p, n, chunk=2048), 3)  # type: ignore[misc]
        found.append(Line(f"prefill in chunks of 2048, {name}: per point of a sweep", prompt_seconds / POINTS, 1e-3))
        found.append(Line(f"decode step, {name}: one point", best(lambda m=step, w=one: m.price(w), 50), None))  # type: ignore[misc]
    command = [sys.executable, "-c", START, "project", "--help"]
    help_seconds = best(lambda: subprocess.run(command, check=False, capture_output=True), 5)
    found.append(Line("disagg project --help", help_seconds, 0.5))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = lines()
    if arguments.json:
        print(json.dumps([{"what": x.what, "seconds": x.seconds, "limit": x.limit} for x in found], indent=1))
    else:
        print("| what | time | limit |\n|---|---|---|")
        for line in found:
            limit = "" if line.limit is None else f"{line.limit * 1e6:.0f} us"
            print(f"| {line.what} | {line.seconds * 1e6:.1f} us | {limit} |")
    return 0 if all(line.limit is None or line.seconds <= line.limit for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
