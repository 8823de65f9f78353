"""One step of an engine, as it was planned."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engines.emulated.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        work: Sequences and how many of their tokens to compute.
        prefill_tokens: Prompt tokens in it.
        decode_seqs: Sequences that compute one token after their prompt.
        context_tokens: KV positions that all of them read.
    """

    work: list[tuple[Sequence, int]]
    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
