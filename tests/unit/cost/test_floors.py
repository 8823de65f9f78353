"""A step is never faster than its weights can be read or its arithmetic be done; figures derived by hand."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.cost.plan import Replica
from disagg.cost.step import price
from disagg.cost.weights import weight_bytes
from disagg.cost.work import decode_work, prompt_work
from tests.support.cost_examples import LLAMA_8B, ideal

BANDWIDTH = 3.35e12


def test_weights_of_a_small_llama_take_as_long_as_published() -> None:
    """32 x (2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336) x 2 B = 13 958 643 712 B = 4.167 ms at 3.35 TB/s;
    128 256 x 4096 x 2 B = 1 050 673 152 B = 0.314 ms."""
    weights = weight_bytes(Replica(LLAMA_8B, ideal()))
    layers = weights["attention"] + weights["mlp"]
    assert layers == 13_958_643_712
    assert weights["head"] == 1_050_673_152
    assert layers / BANDWIDTH * 1e3 == pytest.approx(4.167, abs=5e-4)
    assert weights["head"] / BANDWIDTH * 1e3 == pytest.approx(0.314, abs=5e-4)


def test_a_decode_step_of_one_sequence_streams_the_weights() -> None:
    """On a perfect device one sequence without context takes the weights' 4.480 ms and next to nothing more."""
    step = price(Replica(LLAMA_8B, ideal()), decode_work(np.asarray(1.0), np.asarray(0.0)))
    assert float(step.seconds) * 1e3 == pytest.approx(4.480, rel=0.005)
    assert float(step.seconds) >= (13_958_643_712 + 1_050_673_152) / BANDWIDTH
    assert float(step.memory_bound) == pytest.approx(1.0)


def test_a_prompt_takes_its_arithmetic() -> None:
    """2048 tokens: 2 x 6 979 321 856 weights x 2048 + causal scores 32 x 4 x 4096 x 2048 x 1024.5 + one head row."""
    linear = 2 * 6_979_321_856 * 2048
    scores = 32 * 4 * 4096 * 2048 * 1024.5
    head = 2 * 4096 * 128256
    step = price(Replica(LLAMA_8B, ideal()), prompt_work(np.asarray(1.0), np.asarray(2048.0)))
    assert float(step.flops) == pytest.approx(linear + scores + head, rel=1e-12)
    assert float(step.seconds) >= (linear + scores + head) / 989e12
