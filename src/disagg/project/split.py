"""Separate pools: each with a shape and replicas of its own, and the KV cache's way between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.cost.decode import contexts
from disagg.cost.work import Array
from disagg.project.closed_loop import response_time
from disagg.project.shares import Shares, share_out
from disagg.project.times import ReplicaTimes
from disagg.project.workload import Workload


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """A pool of equal replicas.

    Attributes:
        times: Times of one.
        replicas: How many.
    """

    times: ReplicaTimes
    replicas: int


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """What the prefill pool does in steady state.

    Attributes:
        share: Requests per replica.
        alone: Seconds of one prompt on an idle replica.
        occupancy: Prompts that a replica holds at a time, whole.
        latency: Seconds from a prompt's arrival at the replica to the end of its prefill.
        prompts_per_second: What the pool can do, each replica at its own share.
    """

    share: Shares
    alone: Array
    occupancy: Array
    latency: Array
    prompts_per_second: Array


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """What the decode pool does in steady state.

    Attributes:
        share: Requests per replica.
        step: Seconds of a step of the replica that has most, a mean over a request's contexts.
        total: Seconds of a whole answer.
        answers_per_second: What the pool can do, each replica at its own share.
    """

    share: Shares
    step: Array
    total: Array
    answers_per_second: Array


@dataclass(frozen=True, slots=True)
class Split:
    """Both pools together.

    Attributes:
        prefill: The prefill pool.
        decode: The decode pool.
        requests_per_second: What the deployment can do: the smaller of what its pools can.
        prefill_limits: Where the prefill pool is the slower one.
    """

    prefill: PrefillSide
    decode: DecodeSide
    requests_per_second: Array
    prefill_limits: NDArray[np.bool_]


def decode_side(clients: Array, workload: Workload, pool: PoolTimes) -> DecodeSide:
    """The decode pool with so many requests in it."""
    share = share_out(clients, pool.replicas)
    at = contexts(workload.input_tokens, workload.output_tokens)

    def step(sequences: Array) -> Array:
        steps: Array = pool.times.decode_step(sequences[..., None], at, workload.step_tokens).mean(axis=-1)
        return steps

    def answers(sequences: Array) -> Array:
        return sequences * workload.tokens_per_step / step(sequences) / workload.output_tokens

    largest = step(share.largest)
    total = workload.output_tokens / workload.tokens_per_step * largest
    return DecodeSide(share, largest, total, share.total(answers))


def prefill_side(clients: Array, workload: Workload, pool: PoolTimes, think: Array) -> PrefillSide:
    """The prefill pool with so many clients, each of which is away for `think` seconds between two prompts.

    A closed loop tells how many prompts a replica holds at a time; these are computed together.
    """
    share = share_out(clients, pool.replicas)

    def latency(prompts: Array) -> Array:
        return pool.times.prefill(prompts, workload.new_tokens, workload.cached_tokens)

    alone = latency(np.ones_like(share.largest))
    response = response_time(alone, alone, think, share.largest)
    held = np.rint(share.largest * response / (response + think))
    occupancy = np.clip(held, 1.0, share.largest)

    def prompts(requests: Array) -> Array:
        return requests / latency(requests)

    return PrefillSide(share, alone, occupancy, latency(occupancy), share.total(prompts))


def split(clients: Array, workload: Workload, prefill: PoolTimes, decode: PoolTimes) -> Split:
    """Project both pools under a fixed number of clients.

    Args:
        clients: Requests in the system, whole and at least 1; no more than fit.
        workload: What they are.
        prefill: The prefill pool.
        decode: The decode pool.
    """
    after = decode_side(clients, workload, decode)
    before = prefill_side(clients, workload, prefill, after.total)
    limits: NDArray[np.bool_] = before.prompts_per_second < after.answers_per_second
    return Split(before, after, np.minimum(before.prompts_per_second, after.answers_per_second), limits)
