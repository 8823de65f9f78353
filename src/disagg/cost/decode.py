"""Seconds of decode steps over the life of a request."""

from __future__ import annotations

import numpy as np

from disagg.cost.work import Array, Estimate, Pricer, decode_work

CONTEXTS = 8


def contexts(input_tokens: Array, output_tokens: Array) -> Array:
    """Cache lengths at which decode is priced, evenly from the prompt's end to the answer's: one axis more, of 8."""
    first = np.asarray(input_tokens, dtype=np.float64)[..., None]
    span = np.asarray(output_tokens, dtype=np.float64)[..., None]
    return first + span * (np.arange(CONTEXTS) / (CONTEXTS - 1))


def decode(
    model: Pricer,
    sequences: Array,
    input_tokens: Array,
    output_tokens: Array,
    tokens_per_sequence: Array | float = 1.0,
) -> Estimate:
    """Price the mean step while sequences grow from their prompt to their last token.

    Args:
        model: The replica.
        sequences: Sequences that decode together, each at some point of its life.
        input_tokens: Tokens of a prompt.
        output_tokens: Tokens of an answer.
        tokens_per_sequence: Tokens that each computes in a step.

    Returns:
        The mean over evenly spread contexts from `input_tokens` to `input_tokens + output_tokens`.
    """
    context = contexts(input_tokens, output_tokens)
    count = np.asarray(sequences, dtype=np.float64)[..., None]
    steps = model.price(decode_work(count, context, tokens_per_sequence))
    whole = steps.seconds.mean(axis=-1)
    return Estimate(
        seconds=whole,
        parts={name: part.mean(axis=-1) for name, part in steps.parts.items()},
        memory_bound=np.divide((steps.memory_bound * steps.seconds).mean(axis=-1), np.where(whole > 0, whole, 1.0)),
        flops=steps.flops.mean(axis=-1),
        moved=steps.moved.mean(axis=-1),
        notes=steps.notes,
    )
