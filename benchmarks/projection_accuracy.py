"""How far projections are from measured rows: median and 90th percentile of the error by hardware, engine and phase.

Every row of benchmarks/data (see its README for the sources) is either predicted or counted with the reason why it is
not. What rows do not say is taken as follows, and none of it is fitted:

- a serving point is a run of ten requests per client, all clients at once, followed event by event; answers are drawn
  evenly from 0.8 of the stated length to all of it where lengths are InferenceMAX's (its client's settings), prompts
  have the mean of the same; lengths as stated elsewhere;
- `tp_size` x `attention_dp_size` devices per replica, experts over `moe_ep_size` ranks; where the table squares the
  number of devices and says whether TP or attention DP is meant, the root is taken;
- number formats by name (fp8, fp8_block: FP8; nvfp4; int4_wo: INT4 weights); BF16 without one; the KV cache is FP8
  where TensorRT-LLM runs a quantised checkpoint, else BF16; 4-bit checkpoints keep dense layers whose format the
  model's own checkpoint names; no speculation, even experts;
- engines of 2023: no graphs, the cost model's host that works between steps; others as it assumes by default;
- 8,192 tokens per step; the KV cache goes over the devices' network between nodes, one request at a time.

Three predictions are judged. `plain` has no constant from measured serving at all. `host` adds to each first token
one time per engine, which is fitted here, at each run, to colocated rows of all models but Qwen3-32B; rows that it is
fitted to are not judged by it. `anchored` multiplies `plain` by what one row (the middle one by name) of each
hardware, engine and mode was measured to be over its prediction; that row is not judged.

Run: python -m benchmarks.projection_accuracy [--quick] [--json]

`--quick` takes every 20th row that can be predicted, and still counts all rows that cannot.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy_cases import Case, LeftOut, all_rows
from benchmarks.accuracy_predict import DoesNotFitError
from benchmarks.report import Report

EVERY = 20
PEER = {
    ("split", "ttft"): 74.9,
    ("split", "tpot"): 24.9,
    ("qwen3_32b_h100", "ttft"): 43.6,
    ("qwen3_32b_h100", "tpot"): 13.0,
}
"""Median absolute errors, %, of ai-dynamo/aiconfigurator 0.12 against the rows that it ships: 131 split rows with
worker counts, 145 colocated ones of Qwen3-32B on H100. Its rows are a random part and not the very same."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A case and its prediction, in seconds by phase."""

    case: Case
    predicted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that became of the rows."""

    rows: int
    judged: Sequence[Judged]
    left_out: Mapping[tuple[str, str], int]
    skipped: int


Key = Callable[[Case], tuple[str, ...]]


def evaluate(reads: Iterable[Case | LeftOut], every: int) -> Run:
    """Predict every so-manieth case, and count the rest."""
    reads = list(reads)
    left_out = collections.Counter((one.source, one.reason) for one in reads if isinstance(one, LeftOut))
    cases = [one for one in reads if isinstance(one, Case)]
    judged = []
    for case in cases[::every]:
        try:
            judged.append(Judged(case, case.predict()))
        except DoesNotFitError:
            left_out[case.source, "does not fit into the devices' memory by the model's count"] += 1
    return Run(len(reads), judged, left_out, len(cases) - len(cases[::every]))


def is_peer_colocated(case: Case) -> bool:
    """Whether the row is of the group that the peer published colocated errors for."""
    return (
        case.source == "silicon"
        and case.mode == "colocated"
        and case.model == "qwen3-32b"
        and case.hardware == ("h100_sxm")
    )


def fitted_on(case: Case) -> bool:
    """Whether the engines' host times are fitted to the row."""
    return case.source == "silicon" and case.mode == "colocated" and case.model != "qwen3-32b"


def host_times(judged: Sequence[Judged]) -> Mapping[str, float]:
    """Seconds per engine with the least median relative error of the first token over the rows of the fit."""
    found = {}
    candidates = np.arange(0.0, 0.5005, 0.001)
    for engine in sorted({one.case.engine for one in judged if fitted_on(one.case)}):
        rows = [one for one in judged if one.case.engine == engine and fitted_on(one.case)]
        there = np.asarray([one.case.measured["ttft"] for one in rows])
        here = np.asarray([one.predicted["ttft"] for one in rows])
        errors = np.median(np.abs((here + candidates[:, None]) / there - 1), axis=1)
        found[engine] = float(candidates[int(np.argmin(errors))])
    return found


def with_host(judged: Sequence[Judged], times: Mapping[str, float]) -> list[Judged]:
    """Judged rows that the host times are not fitted to, with them added."""
    return [
        Judged(one.case, {**one.predicted, "ttft": one.predicted["ttft"] + times[one.case.engine]})
        for one in judged
        if one.case.source == "silicon" and one.case.engine in times and not fitted_on(one.case)
    ]


def anchored(judged: Sequence[Judged]) -> list[Judged]:
    """All rows but one of each hardware, engine and mode, scaled by what that one was measured to be."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for one in judged:
        case = one.case
        groups.setdefault((case.source, case.hardware, case.engine, case.mode), []).append(one)
    found = []
    for group in groups.values():
        group.sort(key=lambda one: one.case.name)
        anchor = group.pop(len(group) // 2)
        ratio = {phase: there / anchor.predicted[phase] for phase, there in anchor.case.measured.items()}
        found += [
            Judged(one.case, {phase: value * ratio.get(phase, 1.0) for phase, value in one.predicted.items()})
            for one in group
        ]
    return found


def errors(
    judged: Iterable[Judged], key: Key
) -> dict[tuple[str, ...], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Signed relative errors by group and phase."""
    found: dict[tuple[str, ...], list[float]] = {}
    for one in judged:
        for phase, there in one.case.measured.items():
            found.setdefault((*key(one.case), phase), []).append(one.predicted[phase] / there - 1)
    return {group: np.asarray(values) for group, values in sorted(found.items())}


def add_errors(report: Report, name: str, judged: Sequence[Judged], key: Key) -> None:
    """Count, median, 90th percentile and bias of each group."""
    for group, values in errors(judged, key).items():
        label = "_".join((name, *group)).replace(" ", "_").replace(".", "_").replace("-", "_")
        report.add(f"{label}_rows", len(values), "rows")
        report.add(f"{label}_median_error", 100 * float(np.median(np.abs(values))), "%")
        report.add(f"{label}_p90_error", 100 * float(np.quantile(np.abs(values), 0.9)), "%")
        report.add(f"{label}_bias", 100 * float(np.median(values)), "%")


def add_peer(report: Report, name: str, judged: Sequence[Judged]) -> None:
    """The groups that the peer's errors are published for, and the ratios."""
    groups: dict[str, Callable[[Case], bool]] = {
        "split": lambda case: case.source == "silicon" and case.mode == "split",
        "qwen3_32b_h100": is_peer_colocated,
    }
    for group, belongs in groups.items():
        for (phase,), values in errors([one for one in judged if belongs(one.case)], lambda _: ()).items():
            figure = f"{name}_{group}_{phase}_median_error"
            median = 100 * float(np.median(np.abs(values)))
            report.add(figure, median, "%")
            report.add(f"ratio_{figure}_vs_aiconfigurator", median / PEER[group, phase], "1")


def table(judged: Sequence[Judged]) -> None:
    """Errors by source, mode, hardware, engine and phase, as Markdown."""
    print("| rows of | mode | hardware | engine | phase | n | median error | p90 | bias |")
    print("|---|---|---|---|---|---|---|---|---|")
    key: Key = lambda case: (case.source, case.mode, case.hardware, case.engine)  # noqa: E731
    for group, values in errors(judged, key).items():
        size = np.abs(values)
        shown = (float(np.median(size)), float(np.quantile(size, 0.9)))
        print(f"| {' | '.join(group)} | {len(values)} | {shown[0]:.1%} | {shown[1]:.1%} | {np.median(values):+.1%} |")


def build(run: Run, began: float) -> Report:
    """All figures of a run."""
    report = Report("Projections against measured rows", ["numpy"], peers={"aiconfigurator": "0.12 (published)"})
    report.add("rows", run.rows, "rows")
    report.add("rows_predicted", len(run.judged), "rows")
    report.add("rows_left_out", sum(run.left_out.values()), "rows")
    report.add("rows_not_in_the_quick_subset", run.skipped, "rows")
    times = host_times(run.judged)
    for engine, seconds in times.items():
        report.add(f"host_time_{engine}", seconds * 1e3, "ms")
    for name, judged in (
        ("plain", run.judged),
        ("host", with_host(run.judged, times)),
        ("anchored", anchored(run.judged)),
    ):
        add_peer(report, name, judged)
        add_errors(report, name, judged, lambda case: (case.source, case.mode))
    report.add("elapsed", time.monotonic() - began, "s")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"every {EVERY}th row that can be predicted")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    began = time.monotonic()
    run = evaluate(all_rows(), EVERY if arguments.quick else 1)
    report = build(run, began)
    report.notes.update({f"left out, {source}: {reason}": str(n) for (source, reason), n in run.left_out.items()})
    if not arguments.json:
        table(run.judged)
    report.show(as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
