"""A replica's times, from the cost model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from disagg.cost.prefill import prefill
from disagg.cost.speculation import Speculation
from disagg.cost.work import Array, Pricer, Work, decode_work


@dataclass(frozen=True, slots=True)
class ModelledTimes:
    """Times of one replica as the cost model prices them, measured steps included.

    Attributes:
        model: Prices steps.
        chunk: Tokens of each prompt that a step computes at most; 0 for all.
        speculation: How tokens are proposed in decode steps.
    """

    model: Pricer
    chunk: int = 0
    speculation: Speculation = field(default_factory=Speculation)

    def prefill(self, prompts: Array, new_tokens: Array, cached_tokens: Array) -> Array:
        """From the begin of a batch of equal prompts, given together, to the first token of the last of them."""
        return prefill(self.model, prompts, new_tokens, cached_tokens, chunk=self.chunk).seconds

    def decode_step(self, sequences: Array, context: Array, step_tokens: int) -> Array:
        """One step in which so many sequences decode, each with so many tokens in the cache."""
        step = self.model.price(decode_work(sequences, context, step_tokens)).seconds
        return step + self.speculation.draft_seconds(step)

    def mixed_step(
        self, prompt_tokens: Array, prompt_context: Array, sequences: Array, context: Array, step_tokens: int
    ) -> Array:
        """One step that computes a piece of a prompt while sequences decode."""
        one = np.ones(())
        work = Work(prompt_tokens, prompt_context, one, one, sequences, context, np.asarray(float(step_tokens)))
        step = self.model.price(work).seconds
        return step + self.speculation.draft_seconds(step)
