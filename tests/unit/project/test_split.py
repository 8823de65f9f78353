"""Separate pools under a fixed number of clients, with step times that can be followed by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cost.work import Array
from disagg.project.shares import share_out
from disagg.project.split import PoolTimes, split
from disagg.project.workload import Workload


def a(value: float) -> Array:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


@dataclass(frozen=True)
class FixedTimes:
    """A replica whose prompts take a time each and whose steps take a time whatever is in them."""

    prompt_s: float = 0.1
    step_s: float = 0.01

    def prefill(self, prompts: Array, new_tokens: Array, cached_tokens: Array) -> Array:
        """One prompt after the other."""
        return prompts * self.prompt_s

    def decode_step(self, sequences: Array, context: Array, step_tokens: int) -> Array:
        """Always the same."""
        return np.full(np.broadcast_shapes(np.shape(sequences), np.shape(context)), self.step_s)

    def mixed_step(
        self, prompt_tokens: Array, prompt_context: Array, sequences: Array, context: Array, step_tokens: int
    ) -> Array:
        """Not asked for in separate pools."""
        raise AssertionError("a pool of its own never mixes")


WORK = Workload(a(1000), a(100), a(0))


@given(requests=st.integers(1, 10_000), replicas=st.integers(1, 64))
def test_no_request_is_dropped(requests: int, replicas: int) -> None:
    """The replicas' shares add up to what was asked, and differ by one at most."""
    share = share_out(a(requests), replicas)
    assert float(share.full * share.largest + (replicas - share.full) * share.rest) == requests
    assert float(share.largest - share.rest) in (0.0, 1.0)
    assert float(share.total(lambda held: held)) == requests


def test_five_requests_on_two_replicas_are_three_and_two() -> None:
    """Latency is that of the replica with three; throughput is the sum at three and at two."""
    found = split(a(5), WORK, PoolTimes(FixedTimes(), 1), PoolTimes(FixedTimes(), 2))
    assert float(found.decode.share.largest) == 3
    # 3 / (100 x 10 ms) + 2 / (100 x 10 ms)
    assert float(found.decode.answers_per_second) == pytest.approx(5.0)


def test_the_slower_pool_caps_the_rate_and_is_named() -> None:
    """Prompts of 0.5 s allow 2 requests/s; 32 sequences of 100 steps of 10 ms would allow 32."""
    found = split(a(32), WORK, PoolTimes(FixedTimes(prompt_s=0.5), 1), PoolTimes(FixedTimes(), 1))
    assert float(found.requests_per_second) == pytest.approx(2.0)
    assert bool(found.prefill_limits)
    other = split(a(4), WORK, PoolTimes(FixedTimes(prompt_s=0.01), 1), PoolTimes(FixedTimes(), 1))
    assert float(other.requests_per_second) == pytest.approx(4.0)
    assert not bool(other.prefill_limits)


def test_one_client_never_waits() -> None:
    """A single request's prefill is that of one prompt on an idle replica."""
    found = split(a(1), WORK, PoolTimes(FixedTimes(), 1), PoolTimes(FixedTimes(), 1))
    assert float(found.prefill.latency) == float(found.prefill.alone) == pytest.approx(0.1)


@given(clients=st.integers(1, 500), half=st.integers(1, 8))
def test_two_replicas_at_half_the_load_equal_one(clients: int, half: int) -> None:
    """Twice the requests on twice the replicas double the rate and leave the latency."""
    one = split(a(clients), WORK, PoolTimes(FixedTimes(), half), PoolTimes(FixedTimes(), half))
    two = split(a(2 * clients), WORK, PoolTimes(FixedTimes(), 2 * half), PoolTimes(FixedTimes(), 2 * half))
    assert float(two.requests_per_second) == pytest.approx(2 * float(one.requests_per_second))
    assert float(two.prefill.latency) == pytest.approx(float(one.prefill.latency))


def test_a_sweep_is_one_call() -> None:
    """Points given together have the values that each has alone."""
    clients = np.array([1.0, 7.0, 64.0])
    together = split(clients, WORK, PoolTimes(FixedTimes(), 2), PoolTimes(FixedTimes(), 3))
    for i, value in enumerate(clients):
        alone = split(a(value), WORK, PoolTimes(FixedTimes(), 2), PoolTimes(FixedTimes(), 3))
        assert together.requests_per_second[i] == pytest.approx(float(alone.requests_per_second))
        assert together.prefill.latency[i] == pytest.approx(float(alone.prefill.latency))
