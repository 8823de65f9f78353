"""Continuous batching in one engine: how steps that also hold a piece of a prompt slow decoding down.

In steady state each request that ends is followed by one whose prompt takes `chunks` steps, while the others decode
in the same (mixed) steps. A window is the time in which the engine makes one request's worth of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.work import Array


@dataclass(frozen=True, slots=True)
class ContinuousBatch:
    """Steady state of an engine that prefills and decodes together.

    Attributes:
        pure_steps: Steps of a window that only decode (a mean, so a fraction is right).
        window: Seconds in which the engine makes as many tokens as one request has.
        tpot: Seconds per output token of one request.
        throughput: Output tokens/s of the engine.
        decode_total: Seconds from a request's first token to its last.
        mixed_fraction: Share of the steps that hold a piece of a prompt.
        pollution: Share of the time that goes into such steps, 0 to 1.
        lift: By what share a token takes longer than in pure decode; what a split can win back.
    """

    pure_steps: Array
    window: Array
    tpot: Array
    throughput: Array
    decode_total: Array
    mixed_fraction: Array
    pollution: Array
    lift: Array


def continuous_batch(
    *, clients: Array, output_tokens: Array, chunks: Array, pure: Array, mixed: Array, tokens_per_step: Array
) -> ContinuousBatch:
    """Solve the steady state.

    Args:
        clients: Resident sequences, at least 1.
        output_tokens: Tokens of an answer, at least 1.
        chunks: Steps that one prompt takes.
        pure: Seconds of a step in which all of them decode.
        mixed: Seconds of a step in which one computes a piece of its prompt and the others decode.
        tokens_per_step: Tokens that a sequence gains in a step; 1 without speculation.
    """
    in_mixed = chunks * (clients - 1) * tokens_per_step
    pure_steps = np.maximum(0.0, (output_tokens - in_mixed) / (clients * tokens_per_step))
    window = pure_steps * pure + chunks * mixed
    tpot = clients * window / output_tokens
    return ContinuousBatch(
        pure_steps=pure_steps,
        window=window,
        tpot=tpot,
        throughput=output_tokens / window,
        decode_total=clients * window,
        mixed_fraction=chunks / (pure_steps + chunks),
        pollution=chunks * mixed / window,
        lift=tpot / (pure / tokens_per_step) - 1,
    )


def prompt_chunks(
    *, prompt: Array, chunk: int, budget: int, decoding_tokens: Array, least: int = 1
) -> tuple[Array, Array]:
    """Steps that a prompt takes and tokens in each of them.

    Args:
        prompt: Tokens to compute, without those that are cached.
        chunk: Most tokens of a prompt per step; 0 for no limit.
        budget: Most tokens of a step, decoding ones included; 0 for no limit.
        decoding_tokens: Tokens that the decoding sequences take of the budget.
        least: A prompt moves on by so many tokens at least, however full the step is.

    Returns:
        Number of steps, and mean tokens of the prompt in each.
    """
    size = np.asarray(prompt, dtype=np.float64)
    if chunk:
        size = np.minimum(size, chunk)
    if budget:
        size = np.minimum(size, np.maximum(budget - decoding_tokens, least))
    steps = np.ceil(prompt / size)
    return steps, prompt / steps
