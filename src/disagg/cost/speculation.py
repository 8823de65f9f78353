"""Speculative decoding: tokens that a step yields, and what proposing them costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.work import Array, Pricer, decode_work


def tokens_per_step(proposals: int, acceptance: Array | float) -> Array:
    """Tokens that a sequence gains in a step on average.

    Each proposal is kept with probability a if all before it were, and the target adds one token of its own:
    1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1). Nothing accepted
    gives 1, everything k + 1.

    Args:
        proposals: k, at least 0.
        acceptance: a, from 0 to 1.
    """
    rate = np.asarray(acceptance, dtype=np.float64)
    gained = np.ones(rate.shape)
    power = np.ones(rate.shape)
    for _ in range(proposals):
        power = power * rate
        gained = gained + power
    return gained


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are proposed.

    Attributes:
        proposals: Tokens proposed per step and sequence; 0 for no speculation.
        acceptance: Probability that a proposal is kept if all before it were.
        draft_factor: Cost of proposing one token, as a share of a step of the target that computes one token per
            sequence; where no draft model is given.
    """

    proposals: int = 0
    acceptance: float = 0.0
    draft_factor: float = 0.0

    @property
    def step_tokens(self) -> int:
        """Tokens that a sequence computes in a step: its proposals and the one that is certain."""
        return self.proposals + 1

    @property
    def gain(self) -> float:
        """Tokens that a sequence gains in a step on average."""
        return float(tokens_per_step(self.proposals, self.acceptance))

    def draft_seconds(self, step: Array) -> Array:
        """Seconds of proposing, for a step of the target that takes `step`: factor x k x step / (k + 1)."""
        return step * (self.draft_factor * self.proposals / self.step_tokens)


def draft_model_seconds(draft: Pricer, sequences: Array, context: Array, proposals: int) -> Array:
    """Seconds in which a draft model proposes: one decode step of its own per token, one after another."""
    return draft.price(decode_work(sequences, context)).seconds * proposals
