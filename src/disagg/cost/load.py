"""What of a step falls to the busiest device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.plan import Shape
from disagg.cost.work import Array, Work


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch as the busiest ranks of a stage see it.

    Attributes:
        prompts: Prompts of the busiest attention rank.
        piece: Tokens of one prompt's piece.
        before: Tokens of the prompt before its piece.
        sequences: Decoding sequences of the busiest attention rank.
        step_tokens: Tokens that each of these computes.
        context: Tokens in the cache of each of these.
        tokens: Tokens of the busiest attention rank.
        dense_tokens: Tokens that pass the feed-forward layers of one tensor-parallel group.
        stage_tokens: Tokens of all groups of the stage.
        logits: Tokens of the tensor-parallel group that need logits.
        batches: Micro-batches of prompts that pass through the stages one after another.
    """

    prompts: Array
    piece: Array
    before: Array
    sequences: Array
    step_tokens: Array
    context: Array
    tokens: Array
    dense_tokens: Array
    stage_tokens: Array
    logits: Array
    batches: Array

    @property
    def prompt_tokens(self) -> Array:
        """Prompt tokens of the busiest attention rank."""
        return self.prompts * self.piece

    @property
    def decode_tokens(self) -> Array:
        """Tokens that the sequences of the busiest attention rank compute."""
        return self.sequences * self.step_tokens


def load(work: Work, shape: Shape) -> Load:
    """Spread a step over a replica.

    Pipeline: decoding sequences form as many micro-batches as there are stages, so that each stage always has one;
    prompts follow each other through the stages, each a micro-batch of its own. Attention groups: whole sequences
    are dealt out, so that the busiest one has the rounded-up share.
    """
    stages = shape.pipeline
    prompts = np.asarray(work.prompt_sequences, dtype=np.float64)
    piece = ratio(np.asarray(work.prompt_tokens, dtype=np.float64), prompts)
    before = np.maximum(work.prompt_context - (piece + 1.0) / 2.0, 0.0)
    sequences = np.asarray(work.sequences, dtype=np.float64)
    outputs = np.asarray(work.prompt_outputs, dtype=np.float64)
    batches = np.ones(())
    if stages > 1:
        batches = np.maximum(prompts, 1.0)
        outputs = outputs / batches
        prompts = np.minimum(prompts, 1.0)
        sequences = np.ceil(sequences / stages)
    copies = shape.stage_devices // shape.tensor
    group_prompts, group_sequences = _dealt(prompts, copies), _dealt(sequences, copies)
    rank_prompts = _dealt(group_prompts, shape.attention_data)
    rank_sequences = _dealt(group_sequences, shape.attention_data)
    step_tokens = np.asarray(work.tokens_per_sequence, dtype=np.float64)
    return Load(
        prompts=rank_prompts,
        piece=piece,
        before=before,
        sequences=rank_sequences,
        step_tokens=step_tokens,
        context=np.asarray(work.context, dtype=np.float64),
        tokens=rank_prompts * piece + rank_sequences * step_tokens,
        dense_tokens=group_prompts * piece + group_sequences * step_tokens,
        stage_tokens=prompts * piece + sequences * step_tokens,
        logits=_dealt(outputs, copies) + group_sequences * step_tokens,
        batches=batches,
    )


def _dealt(count: Array, ranks: int) -> Array:
    """Share of the rank that has most."""
    return count if ranks == 1 else np.ceil(count / ranks)


def mean_reach(before: Array, piece: Array, limit: float | None) -> Array:
    """Tokens that a token of a piece attends to on average, itself included.

    The j-th token of a piece reaches before + j tokens, or `limit` if that is less. The mean over j = 1 .. piece is
    (sum of the arithmetic series up to the limit + the rest at the limit) / piece.
    """
    whole = before + (piece + 1.0) / 2.0
    if limit is None:
        return whole
    below = np.clip(limit - before, 0.0, piece)
    total = below * before + below * (below + 1.0) / 2.0 + (piece - below) * limit
    mean: Array = np.where(piece > 0, ratio(total, piece), np.minimum(whole, limit))
    return mean


def ratio(part: Array, whole: Array) -> Array:
    """part / whole, and 0 where the whole is 0."""
    share: Array = part / np.where(whole > 0, whole, 1.0) * (whole > 0)
    return share
