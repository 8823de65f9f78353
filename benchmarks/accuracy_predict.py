"""Predictions of what a load generator measures: means over a run of ten requests per client, all clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng

from benchmarks.waves import Station, wave_response
from disagg.cost.decode import contexts
from disagg.cost.kv import request_bytes_per_device
from disagg.cost.memory import Budget, plan_memory
from disagg.cost.plan import Replica
from disagg.cost.prefill import prefill
from disagg.cost.step import StepModel
from disagg.cost.work import decode_work
from disagg.project.colocated import Chunking, colocated
from disagg.project.replica_times import ModelledTimes
from disagg.project.workload import Workload

ROUNDS = 10
"""Requests per client: InferenceMAX's client sends ten times as many prompts as there are clients."""
BUDGET = 8192
"""Tokens of a step: --max-num-batched-tokens of InferenceMAX's servers, and the engines' own default."""
SEED = 0
"""Of the lengths that are drawn; the same ones at each run."""
SETTLED = 12
"""Turns until the clients in each pool agree with the times that they cause; each halves the difference."""


class DoesNotFitError(Exception):
    """The weights do not fit into the devices by the model's count."""


@dataclass(frozen=True, slots=True)
class Side:
    """Equal replicas."""

    replica: Replica
    workers: int


def one(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(float(value))


def prefill_alone(replica: Replica, prompts: float, tokens: float) -> float:
    """Seconds of a batch of prompts on an idle replica."""
    return float(prefill(StepModel(replica), one(prompts), one(tokens)).seconds)


def decode_step(replica: Replica, sequences: float, context: float) -> float:
    """Seconds of a step that decodes."""
    return float(StepModel(replica).price(decode_work(one(sequences), one(context), 1)).seconds)


def held(replica: Replica, tokens: float) -> float:
    """Sequences that fit."""
    most = float(plan_memory(replica, 1.0, tokens, Budget()).most_sequences)
    if most < 1:
        raise DoesNotFitError
    return most


def batch_of(replica: Replica, prompt: float, waiting: float) -> float:
    """Prompts that a step computes together where so many wait: what the budget of each attention rank holds."""
    return min(max(waiting, 1.0), max(BUDGET // prompt, 1.0) * replica.shape.attention_groups)


def station_of(replica: Replica, prompt: float, waiting: float, alone: float) -> Station:
    """The replica as what computes prompts, with others decoding beside them as far as `alone` has them."""
    most = batch_of(replica, prompt, waiting)
    one_only, all_of_them = (prefill_alone(replica, many, prompt) for many in (1.0, most))
    further = max(all_of_them - one_only, 0.0) / (most - 1) if most > 1 else 0.0
    return Station(alone, further, int(most))


def colocated_run(
    clients: int, prompt: float, answer: float, side: Side, shortest: float = 1.0
) -> Mapping[str, float]:
    """Means of a run against engines that prefill and decode together."""
    fitting = min(float(clients), held(side.replica, prompt + answer))
    work = Workload(one(prompt), one(answer), one(0.0))
    found = colocated(one(fitting), work, ModelledTimes(StepModel(side.replica)), Chunking(0, BUDGET))
    decoding = float(found.batch.decode_total)
    station = station_of(side.replica, prompt, fitting, float(found.alone))
    response = wave_response(station, decoding, int(fitting), ROUNDS, shortest, default_rng(SEED))
    # A prompt that arrives in a step waits for its end: half of one on average.
    first = response + (float(found.pure_step) / 2 if fitting > 1 else 0.0)
    # Who finds no room waits for somebody else's answer to end.
    turned_away = (clients - fitting) * (first + decoding) / fitting
    return {"ttft": first + turned_away, "tpot": float(found.batch.tpot)}


def split_run(
    clients: int, prompt: float, answer: float, before: Side, after: Side, shortest: float = 1.0
) -> Mapping[str, float]:
    """Means of a run against separate pools. The link is the devices' network between nodes, idle."""
    held(before.replica, prompt)
    room = min(float(clients), held(after.replica, prompt + answer) * after.workers)
    alone = prefill_alone(before.replica, 1.0, prompt)
    each = -(-clients // before.workers)
    station = station_of(before.replica, prompt, float(each), alone)
    fabric = before.replica.accelerator.scale_out
    if fabric is None:
        raise DoesNotFitError
    transfer = float(request_bytes_per_device(after.replica, one(prompt))) / fabric.bandwidth.value
    model, at = StepModel(after.replica), contexts(one(prompt), one(answer))
    decoding, step, response = room, 0.0, alone
    for _ in range(SETTLED):
        share = max(decoding / after.workers, 1.0)
        step = float(model.price(decode_work(one(share), at, 1)).seconds.mean())
        away = answer * step + transfer
        response = wave_response(station, away, each, ROUNDS, shortest, default_rng(SEED))
        decoding = (decoding + min(clients * answer * step / (response + away), room)) / 2
    waiting = max(clients / room - 1.0, 0.0) * answer * step
    return {"ttft": response + transfer + step + waiting, "tpot": step}
