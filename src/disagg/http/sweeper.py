"""Coarse deadlines for many connections with one timer.

A deadline per read or write through `loop.call_later` would cost more than the read itself. Here a connection
only stores a number, and one timer looks at all of them every tick.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Expiring(Protocol):
    """Something with a deadline."""

    deadline: float
    """`loop.time()` at which it expires; infinity for never."""

    def expire(self) -> None:
        """Called once the deadline has passed, at most one tick late; must move the deadline or leave the sweeper."""
        ...


class Sweeper:
    """Calls `expire` on members whose deadline has passed. Its timer runs only while it has members."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._members: set[Expiring] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, member: Expiring) -> None:
        """Watch a member until it is discarded."""
        self._members.add(member)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._sweep)

    def discard(self, member: Expiring) -> None:
        """Stop watching a member."""
        self._members.discard(member)
        if not self._members and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        # Re-armed first: a member that discards itself as the last one cancels the timer.
        self._timer = loop.call_later(self._tick_s, self._sweep)
        for member in [m for m in self._members if m.deadline <= now]:
            member.expire()
