"""Measured steps: reproduced where they were measured, carried as far as the model tells, refused elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.catalog.precision import Dtype
from disagg.cost.anchor_file import read_anchors
from disagg.cost.anchored import AnchoredModel, Standing
from disagg.cost.anchors import Anchor, MeasuredStep, Regime, refusal
from disagg.cost.plan import Habits, Precision, Replica, Shape
from disagg.cost.scatter import Scatter
from disagg.cost.step import StepModel
from disagg.cost.work import Work, decode_work, prompt_work
from disagg.errors import ConfigError
from tests.support.cost_examples import LLAMA_8B, LLAMA_70B, device

REPLICA = Replica(LLAMA_8B, device(), Shape(2))
DECODE = tuple(
    MeasuredStep(float(b), 1.0, float(c), ms / 1e3)
    for b, c, ms in ((1, 1000, 6.0), (1, 4000, 6.2), (16, 1000, 7.5), (16, 4000, 9.0))
)
PREFILL = (MeasuredStep(1.0, 512.0, 0.0, 0.012), MeasuredStep(1.0, 2048.0, 0.0, 0.040))
ANCHOR = Anchor("bench 7", Regime("llama-3.1-8b"), Shape(2), DECODE, PREFILL)


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


def seconds(model: AnchoredModel | StepModel, work: Work) -> float:
    """Seconds of one point."""
    return float(model.price(work).seconds)


def test_measured_steps_are_reproduced() -> None:
    """At a measured point the answer is the measurement, in decode and prefill."""
    model = AnchoredModel(REPLICA, [ANCHOR])
    for step in DECODE:
        work = decode_work(a(step.sequences), a(step.context))
        assert seconds(model, work) == pytest.approx(step.seconds, rel=1e-9)
        assert int(model.standing(work)) == Standing.INTERPOLATED
    for step in PREFILL:
        assert seconds(model, prompt_work(a(1), a(step.tokens))) == pytest.approx(step.seconds, rel=1e-9)


def test_between_measured_steps_the_model_gives_the_shape() -> None:
    """The correction in the middle (on logarithmic axes) is the mean of the corrections around it."""
    model, plain = AnchoredModel(REPLICA, [ANCHOR]), StepModel(REPLICA)
    corrections = [s.seconds / seconds(plain, decode_work(a(s.sequences), a(s.context))) for s in DECODE]
    work = decode_work(a(4), a(2000))
    assert seconds(model, work) / seconds(plain, work) == pytest.approx(np.mean(corrections), rel=1e-9)


def test_parts_still_add_up() -> None:
    """A correction scales every part."""
    step = AnchoredModel(REPLICA, [ANCHOR]).price(decode_work(a(16), a(1000)))
    assert sum(float(part) for part in step.parts.values()) == pytest.approx(float(step.seconds), rel=1e-12)
    assert "measured steps: bench 7" in step.notes


def test_beyond_what_was_measured_confidence_falls() -> None:
    """One doubling of load or length is transported, more is far; both keep the nearest correction."""
    model, plain = AnchoredModel(REPLICA, [ANCHOR]), StepModel(REPLICA)
    for sequences, context, standing in (
        (32, 4000, Standing.TRANSPORTED),
        (16, 8000, Standing.TRANSPORTED),
        (64, 4000, Standing.FAR),
        (16, 9000, Standing.FAR),
    ):
        work = decode_work(a(sequences), a(context))
        assert int(model.standing(work)) == standing
        last = seconds(plain, decode_work(a(16), a(4000)))
        assert seconds(model, work) / seconds(plain, work) == pytest.approx(0.009 / last, rel=1e-9)


def test_other_shapes_are_carried_by_the_model() -> None:
    """A measurement on two devices says by how much the model is off; four devices are off by as much."""
    four = dataclasses.replace(REPLICA, shape=Shape(4))
    model = AnchoredModel(four, [ANCHOR])
    work = decode_work(a(16), a(1000))
    off = 0.0075 / seconds(StepModel(REPLICA), work)
    assert seconds(model, work) == pytest.approx(seconds(StepModel(four), work) * off, rel=1e-9)
    assert int(model.standing(work)) == Standing.TRANSPORTED
    eight = dataclasses.replace(REPLICA, shape=Shape(8))
    assert int(AnchoredModel(eight, [ANCHOR]).standing(work)) == Standing.FAR


def test_the_nearest_shape_counts() -> None:
    """Of two anchors the one that was measured in the shape in question is used."""
    other = dataclasses.replace(ANCHOR, source="one device", shape=Shape(1))
    assert [anchor.source for anchor in AnchoredModel(REPLICA, [other, ANCHOR]).used] == ["bench 7"]


def test_a_mixed_step_is_corrected_by_both() -> None:
    """If both kinds are off by the same factor, so is a mixed step; it is as firm as its looser part."""
    plain = StepModel(REPLICA)
    twice = Anchor(
        "double",
        Regime("llama-3.1-8b"),
        Shape(2),
        (MeasuredStep(8.0, 1.0, 1000.0, 2 * seconds(plain, decode_work(a(8), a(1000)))),),
        (MeasuredStep(1.0, 512.0, 0.0, 2 * seconds(plain, prompt_work(a(1), a(512)))),),
    )
    model = AnchoredModel(REPLICA, [twice])
    work = dataclasses.replace(prompt_work(a(1), a(512)), sequences=a(8), context=a(1000))
    assert seconds(model, work) == pytest.approx(2 * seconds(plain, work), rel=1e-9)
    assert int(model.standing(work)) == Standing.INTERPOLATED
    longer = dataclasses.replace(work, context=a(9000))
    assert int(model.standing(longer)) == Standing.FAR


def test_what_was_not_measured_is_modelled() -> None:
    """An anchor without prompts leaves prompts to the model, and says so."""
    model = AnchoredModel(REPLICA, [dataclasses.replace(ANCHOR, prefill=())])
    work = prompt_work(a(1), a(512))
    assert seconds(model, work) == seconds(StepModel(REPLICA), work)
    assert int(model.standing(work)) == Standing.MODELLED


@pytest.mark.parametrize(
    ("regime", "reason"),
    [
        (Regime("llama-3.1-70b"), "model is llama-3.1-70b there and llama-3.1-8b here"),
        (Regime("llama-3.1-8b", accelerator="b200-sxm"), "accelerator is b200-sxm"),
        (Regime("llama-3.1-8b", kv=Dtype.FP8), "format of the KV cache is fp8 there and bf16 here"),
        (Regime("llama-3.1-8b", graphs=False), "capture as graphs is off there and on here"),
        (Regime("llama-3.1-8b", step_tokens=4), "tokens per decode step is 4 there and 1 here"),
    ],
)
def test_other_regimes_are_refused_with_the_reason(regime: Regime, reason: str) -> None:
    """What changes which kernels run is never carried over."""
    with pytest.raises(ConfigError, match=reason):
        AnchoredModel(REPLICA, [dataclasses.replace(ANCHOR, regime=regime)])


def test_one_fitting_anchor_is_enough() -> None:
    """Others are left out and listed; names match without publisher and case; what an anchor does not say fits."""
    other = dataclasses.replace(ANCHOR, source="large", regime=Regime("llama-3.1-70b"))
    model = AnchoredModel(REPLICA, [other, ANCHOR])
    assert model.refused == ("large: model is llama-3.1-70b there and llama-3.1-8b here",)
    named = dataclasses.replace(ANCHOR, regime=Regime("meta-llama/Llama-3.1-8B", "H100-SXM", Dtype.BF16, graphs=True))
    assert refusal(named, REPLICA) is None
    quick = Replica(LLAMA_8B, device(), Shape(2), Precision(dense=Dtype.FP8), Habits(graphs=False))
    assert refusal(named, quick) == (
        "format of dense weights is bf16 there and fp8 here; capture as graphs is on there and off here"
    )


def test_no_anchor_is_a_mistake() -> None:
    """Asking for measured times without giving any is refused."""
    with pytest.raises(ConfigError, match="none given"):
        AnchoredModel(Replica(LLAMA_70B, device()), [])


OWN = {
    "source": "lab",
    "regime": {"model": "llama-3.1-8b", "kv": "fp8", "graphs": True, "step_tokens": 2},
    "shape": {"tensor": 4},
    "decode": [{"sequences": 16, "context": 1024, "ms": 8.5}],
    "prefill": [{"tokens": 1024, "cached": 256, "ms": 25.0}],
}


def test_our_form_is_read() -> None:
    """Every field arrives, milliseconds become seconds."""
    (anchor,) = read_anchors(json.dumps(OWN), "a.json")
    assert anchor == Anchor(
        "lab",
        Regime("llama-3.1-8b", kv=Dtype.FP8, graphs=True, step_tokens=2),
        Shape(4),
        (MeasuredStep(16.0, 2, 1024.0, 0.0085),),
        (MeasuredStep(1.0, 1024.0, 256.0, 0.025),),
    )


def test_the_form_of_other_projectors_is_read() -> None:
    """A sweep over batches at one input length, with the measured point itself unless the sweep has it."""
    text = json.dumps(
        {
            "backend": "vllm",
            "measured": {"model": {"prefill_ms": 20.0, "decode_ms": 8.0}},
            "sweep": [{"batch": 32, "decode_ms": 9.5}],
            "meta": {"model": "llama-3.1-8b", "tp": 2, "batch": 16, "input_len": 512, "host": "node-3"},
        }
    )
    (anchor,) = read_anchors(text, "b.json")
    assert anchor.shape == Shape(2)
    assert anchor.source == "b.json (vllm)"
    assert {(s.sequences, s.context, s.seconds) for s in anchor.decode} == {(32, 512, 0.0095), (16, 512, 0.008)}
    assert anchor.prefill == (MeasuredStep(16.0, 512.0, 0.0, 0.02),)


def test_every_problem_of_a_file_is_told_at_once() -> None:
    """Unknown keys, bad values, missing fields and empty anchors, over all anchors of the file."""
    text = json.dumps(
        [
            {**OWN, "decode": [{"sequences": 0, "context": -1, "ms": 8.5}], "colour": "red"},
            {"shape": {"tensor": 1}},
            {"regime": {"model": "x"}},
        ]
    )
    with pytest.raises(ConfigError) as caught:
        read_anchors(text, "c.json")
    places = {problem.where for problem in caught.value.problems}
    assert places == {
        "c.json: anchor 1: decode.0.sequences",
        "c.json: anchor 1: decode.0.context",
        "c.json: anchor 1: colour",
        "c.json: anchor 2: regime",
        "c.json: anchor 3",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "holds no anchor"), ("3", "valid dictionary"), ("[" * 100_000, "nested too deeply")],
    ids=["broken", "empty", "number", "deep"],
)
def test_what_is_no_anchor_file_is_refused(text: str, message: str) -> None:
    """Broken JSON names its line; an empty list and a number are no anchors."""
    with pytest.raises(ConfigError, match=message):
        read_anchors(text, "d.json")


@given(st.text(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing that a user can put into the file ends in anything but an answer or a list of problems."""
    with contextlib.suppress(ConfigError):
        assert read_anchors(text, "e.json")


points = st.lists(
    st.tuples(st.integers(1, 512), st.integers(1, 65536), st.floats(0.1, 10.0)),
    min_size=1,
    max_size=12,
    unique_by=lambda p: (p[0], p[1]),
)


@given(points, st.floats(1, 2000), st.floats(1, 200_000))
def test_interpolation_stays_within_what_was_measured(
    given_points: list[tuple[int, int, float]], first: float, second: float
) -> None:
    """Exact at each point, between the least and the largest value anywhere else."""
    scatter = Scatter([(float(x), float(y), v) for x, y, v in given_points])
    for x, y, value in given_points:
        assert float(scatter.at(a(x), a(y))) == pytest.approx(value, rel=1e-9)
        assert float(scatter.doublings(a(x), a(y))) == pytest.approx(0, abs=1e-12)
    values = [v for _, _, v in given_points]
    assert min(values) * (1 - 1e-9) <= float(scatter.at(a(first), a(second))) <= max(values) * (1 + 1e-9)
