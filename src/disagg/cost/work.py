"""What an engine's step computes, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
"""A scalar (0-d) or a vector of points; all arrays of one call broadcast with each other."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step of one replica: pieces of prompts and tokens of sequences that decode.

    Attributes:
        prompt_tokens: Prompt tokens that are computed in this step, over all sequences.
        prompt_context: Tokens that a prompt token attends to on average: those before its piece (cached, or of
            earlier chunks) and half of the piece's own.
        prompt_sequences: Sequences that the prompt tokens belong to.
        prompt_outputs: Sequences whose prompt ends in this step, which therefore need logits.
        sequences: Sequences that decode.
        context: Tokens in the KV cache of a decoding sequence, on average.
        tokens_per_sequence: Tokens that each decoding sequence computes in this step: 1, or proposals + 1.
    """

    prompt_tokens: Array
    prompt_context: Array
    prompt_sequences: Array
    prompt_outputs: Array
    sequences: Array
    context: Array
    tokens_per_sequence: Array


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a step takes.

    Attributes:
        seconds: The whole, by point.
        parts: Its parts by name, by point; they add up to the whole. Of communication only what is not hidden.
        memory_bound: Share of the whole that waits for memory rather than for arithmetic, by point.
        flops: Arithmetic of the busiest device, by point.
        moved: Bytes through the memory of the busiest device, by point.
        notes: What the estimate rests on: each default or catalogue figure that took part, once.
    """

    seconds: Array
    parts: Mapping[str, Array]
    memory_bound: Array
    flops: Array
    moved: Array
    notes: tuple[str, ...]


class Pricer(Protocol):
    """What prices steps: the model alone, or corrected by measured steps."""

    def price(self, work: Work) -> Estimate:
        """Price one step. Arrays of the answer have the shape that those of `work` broadcast to."""
        ...


def decode_work(sequences: Array, context: Array, tokens_per_sequence: Array | float = 1.0) -> Work:
    """A step in which all sequences decode and no prompt is computed."""
    zero = np.zeros(())
    return Work(zero, zero, zero, zero, sequences, context, np.asarray(tokens_per_sequence, dtype=np.float64))


def prompt_work(prompts: Array, new_tokens: Array, before: Array | float = 0.0, *, ends: bool = True) -> Work:
    """A step that computes a piece of each of some prompts.

    Args:
        prompts: Number of prompts.
        new_tokens: Tokens of the piece, per prompt.
        before: Tokens of the prompt that are in the cache already, per prompt.
        ends: Whether the piece is the last one, after which a first token is sampled.
    """
    zero = np.zeros(())
    context = np.asarray(before, dtype=np.float64) + (new_tokens + 1) / 2
    return Work(prompts * new_tokens, context, prompts, prompts if ends else zero, zero, zero, np.ones(()))
