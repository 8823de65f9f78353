"""Solve a setup's steady state at one or many operating points."""

from __future__ import annotations

import numpy as np

from disagg.cost.kv import request_bytes_per_device
from disagg.cost.vision import encode
from disagg.cost.work import Array
from disagg.errors import ConfigError, Problem
from disagg.project.colocated import DemandRule, colocated
from disagg.project.first_token import admission_wait
from disagg.project.outcome import Outcome, client_times
from disagg.project.replica_times import ModelledTimes
from disagg.project.setup import PoolSetup, Setup
from disagg.project.shares import share_out
from disagg.project.split import PoolTimes, split
from disagg.project.times import ReplicaTimes
from disagg.project.transfer import transfer_time
from disagg.topology.spec import Stage


def solve(setup: Setup, clients: Array) -> Outcome:
    """Project a setup.

    Args:
        setup: The deployment and what is asked of it.
        clients: Requests in the system, whole and at least 1, by point.
    """
    return _split(setup, clients) if setup.split else _together(setup, clients)


def times_of(pool: PoolSetup) -> ReplicaTimes:
    """The times of one replica of a pool."""
    return ModelledTimes(pool.pricer, pool.chunking.chunk, pool.speculation)


def encoding(setup: Setup) -> Array:
    """Seconds of encoding a request's pictures.

    Raises:
        ConfigError: If there are pictures, and nothing that encodes them.
    """
    asked = setup.topology.workload
    if not asked.images_per_request:
        return np.zeros(())
    pool = setup.pools.get(Stage.ENCODE) or setup.pools.get(Stage.PREFILL) or next(iter(setup.pools.values()))
    if setup.model.vision is None:
        raise ConfigError([Problem("workload.images_per_request", f"{setup.model.name} takes no pictures")])
    return encode(pool.replica, np.asarray(float(asked.images_per_request)), asked.image_size).seconds


def _split(setup: Setup, clients: Array) -> Outcome:
    prefill, decode = setup.pools[Stage.PREFILL], setup.pools[Stage.DECODE]
    work = setup.workload
    found = split(
        clients, work, PoolTimes(times_of(prefill), prefill.replicas), PoolTimes(times_of(decode), decode.replicas)
    )
    if setup.link is None:
        raise ConfigError([Problem("link", "a split needs a link between its pools")])
    # One request's cache, not a batch's; a rank fetches its part over its own link.
    transfer = transfer_time(
        request_bytes_per_device(decode.replica, work.input_tokens, decode.budget.block), setup.link
    )
    parts = {
        "encode": encoding(setup),
        "prefill": found.prefill.latency,
        "kv transfer": transfer,
        "admission": admission_wait(setup.host.admission_steps, found.decode.step),
    }
    if setup.topology.projection.first_output == "decode":
        parts["first decode step"] = found.decode.step
    seen = client_times(parts, found.decode.total, work, setup.host)
    nothing = np.zeros_like(found.decode.step)
    return Outcome(
        first_token=seen.first_token,
        ttft=seen.ttft,
        tpot=found.decode.step / work.tokens_per_step,
        itl=seen.itl,
        decode_total=seen.decode_total,
        latency=seen.latency,
        step=found.decode.step,
        mixed_step=found.decode.step,
        mixed_fraction=nothing,
        pollution=nothing,
        lift=nothing,
        decode_rate=found.requests_per_second * work.output_tokens,
        decode_capacity=found.decode.answers_per_second * work.output_tokens,
        prefill_rate=found.prefill.prompts_per_second * work.input_tokens,
        request_rate=found.requests_per_second,
        prefill_limits=found.prefill_limits,
        occupancy=found.prefill.occupancy,
        alone=found.prefill.alone,
        transfer=transfer + nothing,
    )


def _together(setup: Setup, clients: Array) -> Outcome:
    pool = setup.pools.get(Stage.COLOCATED) or setup.pools[Stage.DECODE]
    times, work = times_of(pool), setup.workload
    share = share_out(clients, pool.replicas)
    rule = DemandRule(setup.topology.projection.ttft_rule)
    largest = colocated(share.largest, work, times, pool.chunking, rule)

    def tokens(held: Array) -> Array:
        return colocated(held, work, times, pool.chunking, rule).batch.throughput

    rate = share.total(tokens)
    parts = {
        "encode": encoding(setup),
        "prefill": largest.alone,
        "waiting for other prompts": largest.first_token - largest.alone,
    }
    seen = client_times(parts, largest.batch.decode_total, work, setup.host)
    one = times.prefill(np.ones(()), work.new_tokens, work.cached_tokens)
    return Outcome(
        first_token=seen.first_token,
        ttft=seen.ttft,
        tpot=largest.batch.tpot,
        itl=seen.itl,
        decode_total=seen.decode_total,
        latency=seen.latency,
        step=largest.pure_step,
        mixed_step=largest.mixed_step,
        mixed_fraction=largest.batch.mixed_fraction,
        pollution=largest.batch.pollution,
        lift=largest.batch.lift,
        decode_rate=rate,
        decode_capacity=rate,
        prefill_rate=pool.replicas * work.input_tokens / one + np.zeros_like(rate),
        request_rate=rate / work.output_tokens,
        prefill_limits=largest.batch.pure_steps <= 0,
        occupancy=np.ones_like(rate),
        alone=one + np.zeros_like(rate),
        transfer=np.zeros_like(rate),
    )
