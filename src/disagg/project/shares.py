"""A whole number of requests over a whole number of replicas, with nothing dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disagg.cost.work import Array


@dataclass(frozen=True, slots=True)
class Shares:
    """How many requests the replicas of a pool hold.

    Attributes:
        replicas: Replicas of the pool.
        largest: Requests of a replica that has the most; latency is theirs.
        full: Replicas that hold so many.
        rest: Requests of each other replica (one less, or equal where it divides).
    """

    replicas: int
    largest: Array
    full: Array
    rest: Array

    def total(self, rate: Callable[[Array], Array]) -> Array:
        """Sum of a rate over the replicas, each at its own share; an empty replica adds nothing."""
        others = self.replicas - self.full
        # An empty replica is not asked: rates of zero requests are not defined.
        some = np.maximum(self.rest, 1)
        return self.full * rate(self.largest) + np.where(self.rest > 0, others, 0) * rate(some)


def share_out(requests: Array, replicas: int) -> Shares:
    """Divide requests as evenly as whole numbers allow.

    Args:
        requests: Whole numbers, at least 1.
        replicas: At least 1.
    """
    each, left = np.divmod(requests, replicas)
    even = left == 0
    return Shares(
        replicas=replicas,
        largest=np.where(even, each, each + 1),
        full=np.where(even, float(replicas), left),
        rest=each,
    )
