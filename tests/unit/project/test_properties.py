"""What holds for any model, shape and load, through the whole projection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.project.capacity import capacity
from disagg.project.run import solve
from disagg.project.setup import Setup, make_setup
from disagg.topology.projection_spec import Projection
from disagg.topology.spec import Link, ParallelShape, Pool, Topology
from disagg.topology.workload_spec import Workload

MODELS = st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "gemma-3-12b"])
LENGTHS = st.integers(1, 16_384)
ANSWERS = st.integers(1, 2_048)
CLIENTS = st.integers(1, 64)
EXAMPLES = settings(max_examples=20)


def topology(model: str, tensor: int, prompt: int, answer: int, clients: int) -> Topology:
    """A split with two prefill and two decode replicas, on devices with memory enough for anything."""
    pool = Pool(replicas=2, parallel=ParallelShape(tensor=tensor))
    return Topology(
        model=model,
        prefill=pool,
        decode=pool,
        link=Link(bandwidth_gbps=400.0),
        workload=Workload(input_len=prompt, output_len=answer, max_concurrency=clients),
        projection=Projection(accelerator="h100-sxm", hbm_capacity_gb=100_000.0),
    )


def setup_of(model: str, prompt: int, answer: int, clients: int) -> Setup:
    """The same, ready to be solved."""
    tensor = 8 if model == "deepseek-v3" else 1
    try:
        return make_setup(topology(model, tensor, prompt, answer, clients))
    except ConfigError as error:
        raise AssertionError(str(error)) from error


def at(setup: Setup) -> np.ndarray:
    """Its operating point."""
    return np.asarray(capacity(setup).used)


@EXAMPLES
@given(model=MODELS, prompt=LENGTHS, answer=ANSWERS, clients=CLIENTS)
def test_a_first_token_waits_for_its_prefill_and_its_transfer(
    model: str, prompt: int, answer: int, clients: int
) -> None:
    """And never for less than one prompt on an idle replica."""
    setup = setup_of(model, prompt, answer, clients)
    found = solve(setup, at(setup))
    one = solve(setup, np.asarray(1.0))
    assert float(found.ttft) >= float(found.first_token["prefill"] + found.transfer)
    assert float(found.first_token["prefill"]) >= float(one.first_token["prefill"]) * (1 - 1e-9)
    assert float(sum(found.first_token.values())) == pytest.approx(float(found.ttft))
    assert float(found.request_rate) > 0


@EXAMPLES
@given(model=MODELS, prompt=LENGTHS, answer=ANSWERS, clients=CLIENTS, faster=st.floats(1.01, 100))
def test_a_faster_link_never_makes_a_first_token_later(
    model: str, prompt: int, answer: int, clients: int, faster: float
) -> None:
    """And changes nothing else."""
    setup = setup_of(model, prompt, answer, clients)
    assert setup.link is not None
    quick = replace(setup, link=replace(setup.link, bandwidth=setup.link.bandwidth * faster))
    before, after = solve(setup, at(setup)), solve(quick, at(quick))
    assert float(after.ttft) <= float(before.ttft)
    assert float(after.request_rate) == float(before.request_rate)
    assert float(after.itl) == float(before.itl)


@EXAMPLES
@given(model=MODELS, prompt=st.integers(1, 8_192), more=st.integers(1, 8_192), answer=ANSWERS, clients=CLIENTS)
def test_longer_prompts_are_never_cheaper(model: str, prompt: int, more: int, answer: int, clients: int) -> None:
    """One prompt alone takes longer, and a token's step reads more of the cache."""
    short, long = setup_of(model, prompt, answer, clients), setup_of(model, prompt + more, answer, clients)
    one = np.asarray(1.0)
    first, second = solve(short, one), solve(long, one)
    assert float(second.first_token["prefill"]) >= float(first.first_token["prefill"]) * (1 - 1e-9)
    assert float(second.step) >= float(first.step) * (1 - 1e-9)
    assert float(second.transfer) >= float(first.transfer)


@EXAMPLES
@given(model=MODELS, prompt=LENGTHS, answer=ANSWERS, clients=CLIENTS)
def test_two_replicas_at_half_the_load_equal_one(model: str, prompt: int, answer: int, clients: int) -> None:
    """Twice of everything is twice the rate at the same latency."""
    setup = setup_of(model, prompt, answer, clients)
    half = replace(setup, pools={stage: replace(pool, replicas=1) for stage, pool in setup.pools.items()})
    one, two = solve(half, np.asarray(float(clients))), solve(setup, np.asarray(2.0 * clients))
    assert float(two.ttft) == pytest.approx(float(one.ttft))
    assert float(two.itl) == pytest.approx(float(one.itl))
    assert float(two.request_rate) == pytest.approx(2 * float(one.request_rate))


@EXAMPLES
@given(model=MODELS, prompt=LENGTHS, answer=st.integers(2, 2_048), clients=CLIENTS)
def test_a_token_apart_is_never_slower_than_together_at_the_same_share(
    model: str, prompt: int, answer: int, clients: int
) -> None:
    """As many sequences per decode replica, and no piece of a prompt in its steps."""
    setup = setup_of(model, prompt, answer, 2 * clients)
    decode = setup.topology.decode
    assert decode is not None
    twin = setup.topology.model_copy(update={"prefill": None, "decode": None, "colocated": decode})
    together = make_setup(twin)
    apart = solve(setup, np.asarray(2.0 * clients))
    assert float(apart.tpot) <= float(solve(together, np.asarray(2.0 * clients)).tpot) * (1 + 1e-9)


@EXAMPLES
@given(model=MODELS, prompt=LENGTHS, answer=ANSWERS, clients=CLIENTS, seed=st.integers(0, 2**16))
def test_points_of_a_sweep_do_not_touch_each_other(
    model: str, prompt: int, answer: int, clients: int, seed: int
) -> None:
    """Many operating points in one call have the values that each has alone."""
    assume(clients > 1)
    setup = setup_of(model, prompt, answer, clients)
    points = np.random.default_rng(seed).integers(1, clients + 1, 5).astype(np.float64)
    together = solve(setup, points)
    for index, point in enumerate(points):
        alone = solve(setup, np.asarray(point))
        assert together.ttft[index] == pytest.approx(float(alone.ttft))
        assert together.request_rate[index] == pytest.approx(float(alone.request_rate))
