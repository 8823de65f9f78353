"""What the formulas of a projection ask of one replica."""

from __future__ import annotations

from typing import Protocol

from disagg.cost.work import Array


class ReplicaTimes(Protocol):
    """Times of one replica. Arguments broadcast; results are seconds."""

    def prefill(self, prompts: Array, new_tokens: Array, cached_tokens: Array) -> Array:
        """From the begin of a batch of equal prompts, given together, to the first token of the last of them."""
        ...

    def decode_step(self, sequences: Array, context: Array, step_tokens: int) -> Array:
        """One step in which so many sequences decode, each with so many tokens in the cache."""
        ...

    def mixed_step(
        self, prompt_tokens: Array, prompt_context: Array, sequences: Array, context: Array, step_tokens: int
    ) -> Array:
        """One step that computes a piece of a prompt while sequences decode.

        Args:
            prompt_tokens: Tokens of the piece.
            prompt_context: Tokens that one of them attends to on average.
            sequences: Sequences that decode; may be 0.
            context: Tokens that each of these has in the cache.
            step_tokens: Tokens that each of these computes.
        """
        ...
