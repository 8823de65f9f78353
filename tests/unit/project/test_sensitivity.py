"""What one change would do to a topology."""

from __future__ import annotations

import pytest

from disagg.project.sensitivity import sensitivity
from disagg.project.setup import make_setup
from disagg.topology.spec import ParallelShape
from tests.unit.project.test_compare import setup_of


def test_more_of_the_limiting_pool_helps_and_more_of_the_other_does_not() -> None:
    """A prefill-limited split: one prefill replica more raises the rate, one decode replica more does not."""
    found = {v.name: v for v in sensitivity(setup_of(1, 8, input_len=8192, output_len=64, max_concurrency=128))}
    now = found["as it is"]
    assert found["prefill: one replica more"].request_rate > now.request_rate * 1.5
    assert found["decode: one replica more"].request_rate == pytest.approx(now.request_rate, rel=0.02)
    assert found["decode: one replica more"].devices == now.devices + 1
    assert found["link twice as fast"].ttft_ms < now.ttft_ms


def test_a_change_that_cannot_be_done_says_why() -> None:
    """Eight KV heads do not go into sixteen ranks and 32 heads not into 64: the rest is told all the same."""
    topology = setup_of(1, 1).topology
    assert topology.decode is not None
    wide = topology.decode.model_copy(update={"parallel": ParallelShape(tensor=32)})
    found = {v.name: v for v in sensitivity(make_setup(topology.model_copy(update={"decode": wide})))}
    assert "ranks" in found["decode: tensor parallelism 64"].refused
    assert found["prefill: one replica more"].refused == ""
