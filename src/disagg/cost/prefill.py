"""Seconds from the begin of a batch of prompts to their first tokens."""

from __future__ import annotations

import numpy as np

from disagg.cost.work import Array, Estimate, Pricer, Work, prompt_work


def prefill(
    model: Pricer, prompts: Array, new_tokens: Array, cached_tokens: Array | float = 0.0, *, chunk: int = 0
) -> Estimate:
    """Price equal prompts that are computed together.

    Args:
        model: The replica.
        prompts: How many.
        new_tokens: Tokens of each that are computed, at least 1.
        cached_tokens: Tokens of each that are in the cache already.
        chunk: Tokens of each prompt that a step computes at most; 0 for all of them.

    Returns:
        The sum over the steps. All but the last step compute whole chunks; the last one gives the first tokens.
    """
    prompts, new_tokens, cached = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (prompts, new_tokens, cached_tokens))
    )
    if chunk <= 0:
        return model.price(prompt_work(prompts, new_tokens, cached))
    steps = int(np.max(np.ceil(new_tokens / chunk)))
    done = chunk * np.arange(steps, dtype=np.float64)
    piece = np.clip(new_tokens[..., None] - done, 0.0, chunk)
    taken = np.where(piece > 0, prompts[..., None], 0.0)
    ends = np.where((piece > 0) & (new_tokens[..., None] <= done + chunk), prompts[..., None], 0.0)
    zero = np.zeros(())
    before = cached[..., None] + done
    work = Work(taken * piece, before + (piece + 1.0) / 2.0, taken, ends, zero, zero, np.ones(()))
    return summed(model.price(work))


def summed(steps: Estimate) -> Estimate:
    """One estimate of several steps one after another; the steps are the last axis of its arrays."""
    whole = steps.seconds.sum(axis=-1)
    waiting = (steps.memory_bound * steps.seconds).sum(axis=-1)
    return Estimate(
        seconds=whole,
        parts={name: part.sum(axis=-1) for name, part in steps.parts.items()},
        memory_bound=np.divide(waiting, np.where(whole > 0, whole, 1.0)),
        flops=steps.flops.sum(axis=-1),
        moved=steps.moved.sum(axis=-1),
        notes=steps.notes,
    )
