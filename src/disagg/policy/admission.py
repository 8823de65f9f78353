"""Who waits, who goes next, and who is told to come back later: decisions about a bounded queue.

Nothing here waits: times are arguments, and whoever asks does the waiting (`disagg.router.admission`).
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable
from math import ceil
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MAX_RETRY_AFTER_S = 60
_WEIGHT = 0.1
"""How much one new gap counts against all earlier ones: the pace follows a change within some ten departures."""


class WaitingLine(Generic[T]):
    """A bounded queue of tickets: lower priorities first, first come first served among equals.

    Args:
        limit: How many may wait; 0 lets nobody wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._levels: dict[int, OrderedDict[T, None]] = {}
        self._order: list[int] = []
        self._priority: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, ticket: T) -> bool:
        return ticket in self._priority

    def add(self, ticket: T, priority: int) -> T | None:
        """Let a ticket wait.

        Args:
            ticket: New in this line.
            priority: Lower is more urgent.

        Returns:
            The ticket that has to go because the line is full: the least urgent one, of several the one that came
            last. It may be the new one. None if there was room.
        """
        if len(self._priority) < self.limit:
            self._append(ticket, priority)
            return None
        if not self._order or priority >= self._order[-1]:
            return ticket
        last = next(reversed(self._levels[self._order[-1]]))
        self.discard(last)
        self._append(ticket, priority)
        return last

    def take(self) -> T | None:
        """Remove and return the ticket whose turn it is; None if nobody waits."""
        if not self._order:
            return None
        ticket = next(iter(self._levels[self._order[0]]))
        self.discard(ticket)
        return ticket

    def discard(self, ticket: T) -> bool:
        """Remove a ticket, wherever it stands.

        Returns:
            False if it does not wait here (any more).
        """
        priority = self._priority.pop(ticket, None)
        if priority is None:
            return False
        level = self._levels[priority]
        del level[ticket]
        if not level:
            del self._levels[priority]
            self._order.remove(priority)
        return True

    def _append(self, ticket: T, priority: int) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            insort(self._order, priority)
        level[ticket] = None
        self._priority[ticket] = priority


class Pace:
    """How fast places become free, from the gaps between departures."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._gap_s: float | None = None

    def begin(self, now_s: float) -> None:
        """A line has formed: a gap before it says nothing about how fast places become free."""
        self._last_s = now_s

    def departed(self, now_s: float) -> None:
        """A place became free while others waited for it."""
        if self._last_s is not None:
            gap_s = max(0.0, now_s - self._last_s)
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + _WEIGHT * (gap_s - self._gap_s)
        self._last_s = now_s

    def retry_after_s(self, ahead: int) -> int:
        """Whole seconds after which a place can be hoped for, from 1 to `MAX_RETRY_AFTER_S`.

        Args:
            ahead: How many wait already.
        """
        if self._gap_s is None:
            return 1
        return max(1, min(MAX_RETRY_AFTER_S, ceil(self._gap_s * (ahead + 1))))


class Allowance:
    """So many requests per minute, as a bucket that fills evenly: a minute's worth may come at once.

    Args:
        per_minute: Above 0.
        now_s: The time.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float) -> int:
        """Take one request out.

        Returns:
            0 if it may pass, else the whole seconds after which one may.
        """
        rate = self.per_minute / 60.0
        self._left = min(float(self.per_minute), self._left + max(0.0, now_s - self._at_s) * rate)
        self._at_s = now_s
        if self._left >= 1.0:
            self._left -= 1.0
            return 0
        return max(1, ceil((1.0 - self._left) / rate))
