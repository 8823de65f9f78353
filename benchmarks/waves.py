"""A short closed-loop run, event by event: clients that begin together keep coming in waves.

Answers of similar length end close together, so that the next prompts meet each other as well. A steady state, in
which arrivals are spread over all the time, is reached only where lengths differ much or runs are long.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Station:
    """What computes prompts, first come, first served.

    Attributes:
        alone: Seconds of one prompt.
        further: Seconds that each further prompt of the same batch adds.
        most: Prompts of a batch at most.
    """

    alone: float
    further: float
    most: int


def wave_response(
    station: Station, think: float, clients: int, rounds: int, shortest: float, random: np.random.Generator
) -> float:
    """Mean seconds from a prompt's arrival to the end of its batch, over a run of so many rounds.

    Args:
        station: What computes prompts.
        think: Mean seconds from the end of a client's prompt to its next one: its answer's time.
        clients: How many, all of which come at once at first.
        rounds: Prompts of each.
        shortest: Answers are drawn evenly from this share of the longest ones to those; 1 for equal ones.
        random: Draws the lengths.
    """
    longest = 2 * think / (1 + shortest)
    thinking = random.uniform(shortest * longest, longest, size=(rounds, clients))
    coming = [(0.0, client, 0) for client in range(clients)]
    free = whole = 0.0
    while coming:
        free = max(free, coming[0][0])
        batch = [heapq.heappop(coming)]
        while coming and coming[0][0] <= free and len(batch) < station.most:
            batch.append(heapq.heappop(coming))
        free += station.alone + (len(batch) - 1) * station.further
        for arrived, client, done in batch:
            whole += free - arrived
            if done + 1 < rounds:
                heapq.heappush(coming, (free + float(thinking[done, client]), client, done + 1))
    return whole / (rounds * clients)
