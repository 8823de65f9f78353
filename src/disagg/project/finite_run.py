"""What a load generator sees that starts all its clients at once and stops after a number of rounds.

The mean time to a first token of such a run is no steady state: in the first round every prompt waits for those of
the other clients; later rounds are spread over time as answers end at different moments.
"""

from __future__ import annotations

import numpy as np

from disagg.cost.work import Array


def fixed_service_response(service: Array, demand: Array, think: Array, clients: Array) -> Array:
    """Mean time from a client's arrival at a station to its answer where all services take the same time.

    Mean value analysis as in `closed_loop.response_time`, but whoever arrives waits only for the rest of the service
    under way, half of it on average (Reiser 1979): response(k) = service + demand x (queued - busy / 2) of k - 1
    clients, with busy = demand x rate. With many clients it is the M/D/1 queue.

    Args:
        service: Seconds that an answer takes when nobody waits.
        demand: Seconds by which each waiting client delays the next one, at most service.
        think: Seconds from an answer to the client's next request.
        clients: Number of clients, whole and at least 1.

    Returns:
        Seconds, at least service.
    """
    service, demand, think, clients = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (service, demand, think, clients))
    )
    response = service.astype(np.float64).copy()
    waiting = np.zeros_like(response)
    most = int(clients.max()) if clients.size else 0
    for k in range(1, most + 1):
        here = service + demand * waiting
        cycle = here + think
        rate = np.divide(k, cycle, out=np.zeros_like(cycle), where=cycle > 0)
        taken = k <= clients
        response = np.where(taken, here, response)
        busy = np.minimum(rate * demand, 1.0)
        waiting = np.where(taken, np.maximum(rate * here - busy / 2, 0.0), waiting)
    return response


def burst_response(batch: Array, batches: Array) -> Array:
    """Mean time to the first tokens of prompts that all arrive at once and are computed batch after batch.

    The j-th of n equal batches ends after j x its time: the mean is (n + 1) / 2 of them.

    Args:
        batch: Seconds of one batch.
        batches: How many, at least 1.
    """
    return batch * (batches + 1.0) / 2.0


def run_mean(burst: Array, steady: Array, rounds: float) -> Array:
    """Mean over a run in which every client sends so many requests one after another, the first ones all at once.

    Args:
        burst: Mean of the first round.
        steady: Mean of each later one.
        rounds: Requests per client, at least 1.
    """
    return (burst + (rounds - 1.0) * steady) / rounds
