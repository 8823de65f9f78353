"""Predictions of what a load generator measures: means over a run of ten requests per client, all clients at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from disagg.cost.kv import request_bytes_per_device
from disagg.cost.memory import Budget, plan_memory
from disagg.cost.plan import Replica
from disagg.cost.prefill import prefill
from disagg.cost.step import StepModel
from disagg.cost.work import decode_work
from disagg.project.colocated import Chunking, colocated
from disagg.project.finite_run import burst_response, fixed_service_response, run_mean
from disagg.project.replica_times import ModelledTimes
from disagg.project.workload import Workload, contexts

ROUNDS = 10.0
"""Requests per client: InferenceMAX's client sends ten times as many prompts as there are clients."""
BUDGET = 8192
"""Tokens of a step: --max-num-batched-tokens of InferenceMAX's servers, and the engines' own default."""
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


def burst(replica: Replica, prompt: float, waiting: float) -> float:
    """Mean time to the first token where so many prompts arrive at once."""
    many = batch_of(replica, prompt, waiting)
    return float(burst_response(one(prefill_alone(replica, many, prompt)), np.ceil(one(waiting) / many)))


def colocated_run(clients: int, prompt: float, answer: float, side: Side) -> Mapping[str, float]:
    """Means of a run against engines that prefill and decode together."""
    fitting = min(float(clients), held(side.replica, prompt + answer))
    work = Workload(one(prompt), one(answer), one(0.0))
    found = colocated(one(fitting), work, ModelledTimes(StepModel(side.replica)), Chunking(0, BUDGET))
    decoding = found.batch.decode_total
    many = batch_of(side.replica, prompt, fitting)
    if many > 1:
        together = prefill_alone(side.replica, many, prompt) / many
        demand = min(together, float(found.alone))
    else:
        demand = float(found.chunks * np.maximum(found.mixed_step - (found.pure_step if fitting > 1 else 0.0), 0.0))
    # A prompt that arrives in a step waits for its end: half of one on average.
    arrival = found.pure_step / 2 if fitting > 1 else one(0.0)
    steady = fixed_service_response(found.alone, one(demand), decoding, one(fitting)) + arrival
    # Who finds no room waits for somebody else's answer to end.
    turned_away = (clients - fitting) * (steady + decoding) / fitting
    first = run_mean(one(burst(side.replica, prompt, fitting)) + turned_away, steady + turned_away, ROUNDS)
    return {"ttft": float(first), "tpot": float(found.batch.tpot)}


def split_run(clients: int, prompt: float, answer: float, before: Side, after: Side) -> Mapping[str, float]:
    """Means of a run against separate pools. The link is the devices' network between nodes, idle."""
    held(before.replica, prompt)
    room = min(float(clients), held(after.replica, prompt + answer) * after.workers)
    alone = prefill_alone(before.replica, 1.0, prompt)
    each = np.ceil(one(clients) / before.workers)
    many = batch_of(before.replica, prompt, float(each))
    demand = min(prefill_alone(before.replica, many, prompt) / many, alone)
    fabric = before.replica.accelerator.scale_out
    if fabric is None:
        raise DoesNotFitError
    transfer = float(request_bytes_per_device(after.replica, one(prompt))) / fabric.bandwidth.value
    model, at = StepModel(after.replica), contexts(Workload(one(prompt), one(answer), one(0.0)))
    decoding, step, response = room, 0.0, alone
    for _ in range(SETTLED):
        share = max(decoding / after.workers, 1.0)
        step = float(model.price(decode_work(one(share), at, 1)).seconds.mean())
        away = one(answer * step + transfer)
        response = float(fixed_service_response(one(alone), one(demand), away, each))
        decoding = (decoding + min(clients * answer * step / (response + float(away)), room)) / 2
    waiting = max(clients / room - 1.0, 0.0) * answer * step
    first = run_mean(one(burst(before.replica, prompt, float(each))), one(response), ROUNDS)
    return {"ttft": float(first) + transfer + step + waiting, "tpot": step}
