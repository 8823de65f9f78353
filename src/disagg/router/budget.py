"""How many retries the router may add to the load: a part of the requests of the last ten seconds.

Retries help against the failure of one engine. When all of them fail, each retry is more load for those that are
left, and a storm of retries keeps them down. So their number is bounded; a failure beyond it reaches the client.
"""

from __future__ import annotations

WINDOW_S = 10
FLOOR = 10
"""Retries that are always allowed within a window: a part of few requests would be none."""


class RetryBudget:
    """Counts requests and retries in slots of one second.

    Args:
        fraction: Most retries as a part of the requests, from 0 to 1.
    """

    __slots__ = ("_fraction", "_requests", "_retries", "_second")

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._second = 0
        self._requests = [0] * WINDOW_S
        self._retries = [0] * WINDOW_S

    def request(self, now: float) -> None:
        """A client's request has arrived at `now`, monotonic seconds."""
        second = int(now)
        if second != self._second:
            self._turn(second)
        self._requests[second % WINDOW_S] += 1

    def take(self, now: float) -> bool:
        """Take one retry at `now`, if there is one.

        Returns:
            Whether it may be made; it is counted then.
        """
        second = int(now)
        if second != self._second:
            self._turn(second)
        if sum(self._retries) >= max(FLOOR, self._fraction * sum(self._requests)):
            return False
        self._retries[second % WINDOW_S] += 1
        return True

    def _turn(self, second: int) -> None:
        """Forget the slots that have left the window."""
        for gone in range(self._second + 1, min(second, self._second + WINDOW_S) + 1):
            self._requests[gone % WINDOW_S] = 0
            self._retries[gone % WINDOW_S] = 0
        self._second = second
