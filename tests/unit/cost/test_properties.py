"""What holds for any model, shape and amount of work."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.model import Model
from disagg.catalog.precision import Dtype
from disagg.cost.checks import shape_problems
from disagg.cost.memory import Budget, plan_memory
from disagg.cost.plan import Habits, Precision, Replica, Shape
from disagg.cost.prefill import prefill
from disagg.cost.step import StepModel, price
from disagg.cost.weights import weight_bytes
from disagg.cost.work import Estimate, Work, decode_work, prompt_work
from disagg.errors import ConfigError
from tests.support.cost_examples import LLAMA_8B, MODELS, device

SHAPES = [
    Shape(),
    Shape(2),
    Shape(4),
    Shape(8),
    Shape(4, 2),
    Shape(2, 4),
    Shape(8, attention_data=8, expert=8),
    Shape(8, attention_data=2, expert=8),
    Shape(8, attention_data=4),
    Shape(8, context=2),
    Shape(8, expert=4),
    Shape(1, expert=8),
    Shape(16, attention_data=16, expert=16),
]
PRECISIONS = [
    Precision(),
    Precision(kv=Dtype.FP8),
    Precision(Dtype.FP8, Dtype.FP8, Dtype.FP8, Dtype.FP8, Dtype.BF16),
    Precision(experts=Dtype.MXFP4),
    Precision(dense=Dtype.INT4, experts=Dtype.INT4),
]


@st.composite
def replicas(draw: st.DrawFn, accelerator: Accelerator | None = None) -> Replica:
    """A model that is spread in a way that is possible for it."""
    model: Model = draw(st.sampled_from(MODELS))
    shape = draw(st.sampled_from(SHAPES))
    assume(not shape_problems(model, shape))
    habits = Habits(
        expert_balance=draw(st.sampled_from([1.0, 1.5])),
        redundant_experts=draw(st.sampled_from([0, 32])) if shape.expert > 1 else 0,
        routing_skew=draw(st.sampled_from([0.0, 0.8])),
        windowed_decode=draw(st.booleans()),
        graphs=draw(st.booleans()),
    )
    return Replica(model, accelerator or device(), shape, draw(st.sampled_from(PRECISIONS)), habits)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """A step: prompts, decoding sequences, or both."""
    decoding = draw(st.integers(0, 600))
    prompts = draw(st.integers(0 if decoding else 1, 5))
    piece = draw(st.integers(1, 9000))
    before = draw(st.sampled_from([0, 1, 4096, 20000]))
    step_tokens = draw(st.integers(1, 4))
    context = draw(st.integers(0, 60000))
    return mixed(prompts, piece, before, decoding, context, step_tokens)


def mixed(
    prompts: float, piece: float, before: float, decoding: float, context: float, step_tokens: float = 1.0
) -> Work:
    """A step that may hold prompts and decoding sequences."""
    prompt = prompt_work(np.asarray(float(prompts)), np.asarray(float(piece)), before)
    return dataclasses.replace(
        prompt,
        sequences=np.asarray(float(decoding)),
        context=np.asarray(float(context)),
        tokens_per_sequence=np.asarray(float(step_tokens)),
    )


def seconds(step: Estimate) -> float:
    """Seconds of a single point."""
    return float(step.seconds)


@given(replicas(), works())
def test_parts_add_up_to_the_whole(replica: Replica, work: Work) -> None:
    """A report may show the parts: nothing is lost, nothing counts twice, nothing is negative."""
    step = price(replica, work)
    assert sum(float(part) for part in step.parts.values()) == pytest.approx(seconds(step), rel=1e-12)
    assert all(float(part) >= 0 for part in step.parts.values())
    assert 0 <= float(step.memory_bound) <= 1 + 1e-12
    assert np.isfinite(step.seconds)


@given(replicas(), works(), st.sampled_from(["memory", "links", "peak"]), st.floats(1.0, 50.0))
def test_a_faster_device_is_never_slower(replica: Replica, work: Work, what: str, factor: float) -> None:
    """More memory bandwidth, more link bandwidth or a higher peak do not make a step longer."""
    faster = device(
        bandwidth=3.35e12 * (factor if what == "memory" else 1.0),
        link=450e9 * (factor if what == "links" else 1.0),
        peak=989e12 * (factor if what == "peak" else 1.0),
    )
    quick = price(dataclasses.replace(replica, accelerator=faster), work)
    assert seconds(quick) <= seconds(price(replica, work)) * (1 + 1e-12)


AMOUNTS = st.fixed_dictionaries(
    {
        "prompts": st.integers(0, 4),
        "piece": st.integers(1, 5000),
        "before": st.sampled_from([0, 3000]),
        "decoding": st.integers(0, 300),
        "context": st.integers(0, 30000),
        "step_tokens": st.integers(1, 3),
    }
)


@given(replicas(), AMOUNTS, st.sampled_from(["prompts", "piece", "before", "decoding", "context", "step_tokens"]))
def test_more_tokens_are_never_cheaper(replica: Replica, amounts: dict[str, int], what: str) -> None:
    """Whatever is added to a step, it does not end earlier."""
    assume(amounts["prompts"] or amounts["decoding"])
    model = StepModel(replica)
    less = model.price(mixed(**amounts))
    for more in (1, 63, 700):
        grown = model.price(mixed(**{**amounts, what: amounts[what] + more}))
        assert seconds(grown) >= seconds(less) * (1 - 1e-12)


@given(replicas(), works())
def test_no_step_beats_the_peak(replica: Replica, work: Work) -> None:
    """Arithmetic of the busiest device / the highest peak, and bytes / bandwidth, are floors."""
    step = price(replica, work)
    peak = max(fig.value for fig in replica.accelerator.peak.values())
    assert seconds(step) >= float(step.flops) / peak
    assert seconds(step) >= float(step.moved) / replica.accelerator.bandwidth.value


@given(replicas(), st.integers(1, 300), st.integers(0, 9000))
def test_no_decode_step_is_faster_than_its_weights(replica: Replica, sequences: int, context: int) -> None:
    """Every weight that all tokens pass is read once per step."""
    step = price(replica, decode_work(np.asarray(float(sequences)), np.asarray(float(context))))
    weights = weight_bytes(replica)
    passed = sum(weights.get(part, 0.0) for part in ("attention", "mlp", "head"))
    assert seconds(step) >= passed / replica.accelerator.bandwidth.value * 0.999


@given(replicas(), st.integers(1, 4), st.integers(1, 6000), st.sampled_from([0, 1000]), st.integers(64, 4096))
def test_chunks_do_not_save_anything(replica: Replica, prompts: int, tokens: int, cached: int, chunk: int) -> None:
    """A prompt in pieces takes at least the arithmetic and the time of the prompt in one."""
    model = StepModel(replica)
    count, length = np.asarray(float(prompts)), np.asarray(float(tokens))
    whole = prefill(model, count, length, float(cached))
    cut = prefill(model, count, length, float(cached), chunk=chunk)
    assert float(cut.flops) >= float(whole.flops) * (1 - 1e-9)
    assert seconds(cut) >= seconds(whole) * (1 - 1e-9)


@given(replicas(), works())
def test_spreading_loses_no_work(replica: Replica, work: Work) -> None:
    """All devices together do at least the arithmetic that one would do, whatever is replicated or rounded up."""
    alone = price(dataclasses.replace(replica, shape=Shape(), accelerator=device(nodes=None)), work)
    spread = price(replica, work)
    assert float(spread.flops) * replica.shape.devices >= float(alone.flops) * (1 - 1e-9)


@given(replicas(), st.integers(0, 5000), st.integers(1, 30000), st.sampled_from([0, 16, 512]))
def test_memory_adds_up(replica: Replica, sequences: int, tokens: int, block: int) -> None:
    """Parts make the total; what is said to fit fits, and one more does not."""
    plan = plan_memory(replica, float(sequences), float(tokens), Budget(block=block, reserve=1e9))
    parts = sum(plan.weights.values()) + plan.draft + plan.activations + plan.reserve
    assert float(plan.total) == pytest.approx(parts + float(plan.kv), rel=1e-12)
    assert bool(plan.fits) == (float(plan.missing) == 0.0)
    most = float(plan.most_sequences)
    if most >= 1:
        assert bool(plan_memory(replica, most, float(tokens), Budget(block=block, reserve=1e9)).fits)
        assert not bool(plan_memory(replica, most + 1, float(tokens), Budget(block=block, reserve=1e9)).fits)


@given(replicas())
def test_weights_are_all_somewhere(replica: Replica) -> None:
    """The devices of a replica hold every weight at least once."""
    alone = weight_bytes(dataclasses.replace(replica, shape=Shape(), habits=Habits()))
    spread = weight_bytes(replica)
    for part in ("attention", "mlp", "experts", "shared_experts"):
        assert spread.get(part, 0.0) * replica.shape.devices >= alone.get(part, 0.0) * (1 - 1e-9)


def test_points_of_a_sweep_are_priced_as_if_alone() -> None:
    """A vector of points gives what each point gives by itself, and arguments broadcast."""
    model = StepModel(Replica(LLAMA_8B, device(), Shape(2)))
    sequences, contexts = np.asarray([1.0, 7.0, 64.0]), np.asarray([[100.0], [5000.0]])
    grid = model.price(decode_work(sequences, contexts))
    assert grid.seconds.shape == (2, 3)
    assert all(part.shape == (2, 3) for part in grid.parts.values())
    for i, context in enumerate(contexts[:, 0]):
        for j, count in enumerate(sequences):
            one = model.price(decode_work(np.asarray(count), np.asarray(context)))
            assert float(grid.seconds[i, j]) == pytest.approx(float(one.seconds), rel=1e-14)


def test_a_replica_that_does_nothing_takes_no_time() -> None:
    """No tokens: no kernel, no host, no communication."""
    step = price(Replica(LLAMA_8B, device(), Shape(2)), decode_work(np.asarray(0.0), np.asarray(0.0)))
    assert seconds(step) == 0.0


def test_a_quicker_interconnect_does_not_touch_arithmetic() -> None:
    """Only the parts of communication depend on links."""
    replica = Replica(LLAMA_8B, device(), Shape(2))
    other = dataclasses.replace(replica, accelerator=device(link=900e9))
    work = decode_work(np.asarray(8.0), np.asarray(500.0))
    here, there = price(replica, work), price(other, work)
    changed = {name for name in here.parts if float(here.parts[name]) != float(there.parts[name])}
    assert changed == {"all_reduce", "all_gather"}


def test_a_device_without_a_peak_is_refused() -> None:
    """What a device computes in is never guessed."""
    blind = dataclasses.replace(device(), peak={})
    with pytest.raises(ConfigError, match="no peak for bf16"):
        price(Replica(LLAMA_8B, blind), decode_work(np.asarray(1.0), np.asarray(1.0)))
