"""Tokens per step of speculative decoding, and what proposing costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cost.plan import Replica
from disagg.cost.speculation import Speculation, draft_model_seconds, tokens_per_step
from disagg.cost.step import StepModel
from disagg.cost.work import decode_work
from tests.support.cost_examples import LLAMA_8B, device


@pytest.mark.parametrize(
    ("proposals", "acceptance", "gained"),
    [(3, 0.6, 2.176), (5, 0.7, 2.94117), (1, 0.5, 1.5), (4, 0.0, 1.0), (4, 1.0, 5.0), (0, 0.9, 1.0)],
)
def test_tokens_per_step(proposals: int, acceptance: float, gained: float) -> None:
    """(1 - a^(k+1)) / (1 - a); nothing accepted gives the one certain token, everything all of them."""
    assert float(tokens_per_step(proposals, acceptance)) == pytest.approx(gained, rel=1e-6)
    assert Speculation(proposals, acceptance).gain == pytest.approx(gained, rel=1e-6)


@given(st.integers(0, 12), st.floats(0, 1), st.floats(0, 1))
def test_more_acceptance_gains_more(proposals: int, one: float, other: float) -> None:
    """Between 1 and k + 1, growing with acceptance and with proposals."""
    low, high = sorted((one, other))
    gained = tokens_per_step(proposals, np.asarray([low, high]))
    assert 1 <= gained[0] <= gained[1] <= proposals + 1 + 1e-9
    assert tokens_per_step(proposals + 1, high) >= gained[1]


def test_drafts_cost_a_share_of_a_plain_step() -> None:
    """Factor 0.05, 3 proposals: a step of 12 ms that computes 4 tokens stands for 3 ms per token: 3 x 0.05 x 3 ms."""
    speculation = Speculation(3, 0.6, 0.05)
    assert speculation.step_tokens == 4
    assert float(speculation.draft_seconds(np.asarray(12e-3))) == pytest.approx(0.45e-3)
    assert float(Speculation().draft_seconds(np.asarray(12e-3))) == 0


def test_a_draft_model_takes_its_own_steps() -> None:
    """One step of the draft per proposed token."""
    draft = StepModel(Replica(LLAMA_8B, device()))
    sequences, context = np.asarray(8.0), np.asarray(500.0)
    one = float(draft.price(decode_work(sequences, context)).seconds)
    assert float(draft_model_seconds(draft, sequences, context, 3)) == pytest.approx(3 * one)
