"""The baseline: each replica prefills and decodes, by continuous batching with chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from disagg.cost.decode import contexts
from disagg.cost.work import Array
from disagg.project.closed_loop import response_time
from disagg.project.continuous import ContinuousBatch, continuous_batch, prompt_chunks
from disagg.project.times import ReplicaTimes
from disagg.project.workload import Workload


class DemandRule(StrEnum):
    """By how much a waiting prompt delays the next one."""

    WHOLE_STEP = "whole-step"
    """By its mixed steps, decoding included (the older rule of published projections)."""
    PROMPT_PART = "prompt-part"
    """By what its pieces add to the steps, since decoding goes on in them anyway."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How an engine cuts prompts.

    Attributes:
        chunk: Most tokens of one prompt per step; 0 for no limit.
        budget: Most tokens of a step; 0 for no limit.
    """

    chunk: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True)
class Colocated:
    """Steady state of one replica.

    Attributes:
        batch: Its continuous batch.
        pure_step: Seconds of a step that only decodes.
        mixed_step: Seconds of a step that also holds a piece of a prompt.
        chunks: Steps that a prompt takes.
        alone: Seconds to the first token if no other prompt waits.
        first_token: The same with waiting for other prompts.
    """

    batch: ContinuousBatch
    pure_step: Array
    mixed_step: Array
    chunks: Array
    alone: Array
    first_token: Array


def colocated(
    clients: Array,
    workload: Workload,
    times: ReplicaTimes,
    chunking: Chunking,
    rule: DemandRule = DemandRule.PROMPT_PART,
) -> Colocated:
    """Project one replica.

    Args:
        clients: Requests that the replica holds, at least 1.
        workload: What they are.
        times: The replica's times.
        chunking: How it cuts prompts.
        rule: By how much prompts delay each other.
    """
    others = clients - 1
    step_tokens = workload.step_tokens
    chunks, piece = prompt_chunks(
        prompt=workload.new_tokens,
        chunk=chunking.chunk,
        budget=chunking.budget,
        decoding_tokens=others * step_tokens,
    )
    at = contexts(workload.input_tokens, workload.output_tokens)
    pure = times.decode_step(clients[..., None], at, step_tokens).mean(axis=-1)
    # Over all pieces of a prompt a token looks back on what is cached and on half of the rest.
    looks_back = (workload.cached_tokens + (workload.new_tokens + 1) / 2)[..., None]
    mixed = times.mixed_step(piece[..., None], looks_back, others[..., None], at, step_tokens).mean(axis=-1)
    batch = continuous_batch(
        clients=clients,
        output_tokens=workload.output_tokens,
        chunks=chunks,
        pure=pure,
        mixed=mixed,
        tokens_per_step=np.asarray(workload.tokens_per_step),
    )
    alone = chunks * mixed
    if rule is DemandRule.WHOLE_STEP:
        demand = alone
    else:
        decoding = np.where(others > 0, pure, 0.0)
        demand = chunks * np.maximum(mixed - decoding, 0.0)
    first = response_time(alone, demand, batch.decode_total, clients)
    return Colocated(batch, pure, mixed, chunks, alone, first)
