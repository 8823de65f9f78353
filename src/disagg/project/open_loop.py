"""Requests that arrive at a rate of their own, whatever the service does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.cost.work import Array

# A wait for an overloaded service has no mean; this many service times keep it finite and last in every ranking.
SATURATED_SERVICE_TIMES = 1000.0


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A service under offered load.

    Attributes:
        utilization: Offered rate over the sustainable one; 1 or more is saturated.
        saturated: Whether the waiting line grows without end.
        wait: Mean seconds in the queue; 1000 service times where saturated.
    """

    utilization: Array
    saturated: NDArray[np.bool_]
    wait: Array


def open_loop(*, offered: Array, sustainable: Array, deterministic: bool) -> OpenLoop:
    """Mean wait of an M/M/1 queue, halved for arrivals in even steps.

    Args:
        offered: Requests/s that arrive.
        sustainable: Requests/s that can be served.
        deterministic: Whether arrivals are evenly spaced instead of Poisson.
    """
    load = offered / sustainable
    saturated = load >= 1
    spare = np.where(saturated, 1.0, 1 - load)
    wait = np.where(saturated, SATURATED_SERVICE_TIMES, load / spare) / sustainable
    # The cap holds below saturation as well, so that the ranking by wait never turns round.
    wait = np.minimum(wait, SATURATED_SERVICE_TIMES / sustainable)
    return OpenLoop(load, saturated, np.where(saturated, wait, wait * (0.5 if deterministic else 1.0)))
