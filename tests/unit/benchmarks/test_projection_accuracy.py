"""The comparison with measured rows: nothing lost, nothing fitted to what it is judged on, arithmetic by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

from benchmarks import projection_accuracy
from benchmarks.accuracy_cases import Case, LeftOut, all_rows, rows
from benchmarks.accuracy_replay import Arrival, replay
from benchmarks.projection_accuracy import (
    Judged,
    anchored,
    errors,
    fitted_on,
    host_times,
    is_peer_colocated,
    with_host,
)
from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.models import find_model
from disagg.cost.plan import Replica


def judged(model: str, measured: float, predicted: float, mode: str = "colocated", name: str = "a") -> Judged:
    there: Mapping[str, float] = {"ttft": measured, "tpot": 1.0}
    case = Case("silicon", name, model, "h100_sxm", "vllm", mode, there, lambda: there)
    return Judged(case, {"ttft": predicted, "tpot": 1.0})


def test_every_row_of_the_serving_points_is_a_case_or_has_a_reason() -> None:
    """Each line of the extract appears once, in its order: predicted or left out with a reason that is not empty."""
    found = [one for one in all_rows() if one.source == "silicon"]
    assert [one.name for one in found] == [row["id"] for row in rows("silicon.csv.gz")]
    assert all(one.reason for one in found if isinstance(one, LeftOut))


def test_every_request_and_phase_is_there() -> None:
    """630 runs of phases, two runs of 300 requests, 117 of decode against context."""
    found = [one.source for one in all_rows()]
    assert [found.count(source) for source in ("splitwise", "requests", "inferencex")] == [630, 600, 117]


def test_quick_run_accounts_for_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predicted, left out and outside the subset add up to all rows; each figure has a unit; peers have ratios."""
    monkeypatch.setattr(sys, "argv", ["projection_accuracy", "--quick", "--json"])
    assert projection_accuracy.main() == 0
    shown = json.loads(capsys.readouterr().out)
    figures = shown["figures"]
    parts = ("rows_predicted", "rows_left_out", "rows_not_in_the_quick_subset")
    assert sum(figures[part]["value"] for part in parts) == figures["rows"]["value"] == len(list(all_rows()))
    assert all(figure["unit"] for figure in figures.values())
    for group in ("split", "qwen3_32b_h100"):
        for phase in ("ttft", "tpot"):
            assert figures[f"ratio_plain_{group}_{phase}_median_error_vs_aiconfigurator"]["unit"] == "1"
    reasons = [int(n) for name, n in shown["notes"].items() if name.startswith("left out")]
    assert sum(reasons) == figures["rows_left_out"]["value"]


def test_host_times_are_not_judged_on_the_rows_they_are_fitted_to() -> None:
    """Rows of the fit are 0.1 s short, those judged 0.3 s: the fit says 0.1, and only the others are judged by it."""
    fit = [judged("llama-3.1-70b", 0.5, 0.4, name=str(n)) for n in range(3)]
    others = [judged("qwen3-32b", 0.5, 0.2), judged("deepseek-v3", 0.5, 0.2, mode="split")]
    times = host_times([*fit, *others])
    assert times == {"vllm": pytest.approx(0.1)}
    found = with_host([*fit, *others], times)
    assert [one.predicted["ttft"] for one in found] == [pytest.approx(0.3)] * 2
    assert not any(fitted_on(one.case) for one in found)
    assert is_peer_colocated(found[0].case)
    assert not is_peer_colocated(found[1].case)


def test_an_anchor_is_not_judged_and_scales_the_rest() -> None:
    """The middle of three was measured at twice its prediction: the other two are doubled, itself is not judged."""
    three = [judged("qwen3-32b", measured, 1.0, name=name) for name, measured in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
    found = anchored(three)
    assert [(one.case.name, one.predicted["ttft"]) for one in found] == [("a", 2.0), ("c", 2.0)]
    assert list(errors(found, lambda case: (case.engine,))["vllm", "ttft"]) == [
        pytest.approx(1.0),
        pytest.approx(-1 / 3),
    ]


def test_a_replayed_request_alone_and_one_that_waits() -> None:
    """With room for one, the second request's first token comes after the last one of the first."""
    replica = Replica(find_model("llama-3.1-8b"), find_accelerator("h100-sxm"))
    alone = replay(replica, [Arrival(1.0, 100, 3)], 128, 2048)
    both = replay(replica, [Arrival(1.0, 100, 3), Arrival(1.0, 100, 3)], 1, 2048)
    assert 1.0 < alone[0][0] < alone[0][1]
    assert both[0] == alone[0]
    assert both[1][0] - both[0][1] == pytest.approx(alone[0][0] - 1.0)
