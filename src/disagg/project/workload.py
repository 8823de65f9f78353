"""What is asked of a deployment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.work import Array


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal requests.

    Attributes:
        input_tokens: Tokens of a prompt, at least 1.
        output_tokens: Tokens of an answer, at least 1.
        cached_tokens: Tokens of a prompt that are in the prefix cache already, at most input - 1.
        tokens_per_step: Tokens that a sequence gains in a decode step on average; 1 without speculation.
        step_tokens: Tokens that a sequence computes in a decode step: 1, or proposals + 1.
    """

    input_tokens: Array
    output_tokens: Array
    cached_tokens: Array
    tokens_per_step: float = 1.0
    step_tokens: int = 1

    @property
    def new_tokens(self) -> Array:
        """Tokens of a prompt that have to be computed."""
        return self.input_tokens - self.cached_tokens


def cached_tokens(input_tokens: Array, hit_rate: float) -> Array:
    """Tokens of a prompt that a prefix cache gives: all but one at most, as the last one makes the first output."""
    found: Array = np.minimum(np.floor(hit_rate * input_tokens), input_tokens - 1)
    return np.maximum(found, 0.0)
