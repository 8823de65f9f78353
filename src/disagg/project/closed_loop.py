"""A station with a fixed number of clients, each of which waits for its answer and then thinks."""

from __future__ import annotations

import numpy as np

from disagg.cost.work import Array


def response_time(service: Array, demand: Array, think: Array, clients: Array) -> Array:
    """Mean time from a client's arrival at the station to its answer, by exact mean value analysis.

    With k clients an arriving one finds the queue that k - 1 clients make on average (Reiser and Lavenberg's
    arrival theorem): response(k) = service + demand x queued(k - 1), queued(k) = k x response / (response + think).

    Args:
        service: Seconds that an answer takes when nobody waits.
        demand: Seconds by which each waiting client delays the next one; equal to service at a plain queue.
        think: Seconds from an answer to the client's next request.
        clients: Number of clients, whole and at least 1; 0 gives service.

    Returns:
        Seconds. One client never waits; without think time the answer is clients x demand for demand = service.
    """
    service, demand, think, clients = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (service, demand, think, clients))
    )
    response = service.astype(np.float64).copy()
    queued = np.zeros_like(response)
    most = int(clients.max()) if clients.size else 0
    for k in range(1, most + 1):
        here = service + demand * queued
        cycle = here + think
        # A station that takes no time at all holds nobody.
        held = np.divide(k * here, cycle, out=np.zeros_like(cycle), where=cycle > 0)
        taken = k <= clients
        response = np.where(taken, here, response)
        queued = np.where(taken, held, queued)
    return response
