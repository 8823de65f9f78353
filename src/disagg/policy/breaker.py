"""When an instance gets no requests for a while: a circuit breaker, as a state machine over events and times.

::

    CLOSED ── `failures` in a row ──> OPEN ── its time is over ──> HALF_OPEN ── the trial succeeds ──> CLOSED
                                       ^                                |
                                       └── the trial fails: twice as long, up to `max_open_s`

The caller says what happened and when. What it must not report at all is in its hands: a request that the engine
refused (4xx, 429) or that its client gave up says nothing about the engine.

A handover has two ends, and its failure cannot tell which one is at fault. So it counts against both, each time with
the partner's name; as soon as one of them is found guilty, the other is forgiven what it got with that one, and is
closed again if nothing else has opened it.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import NamedTuple


class Phase(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half-open"
    """One request at a time, the trial."""


class BreakerRules(NamedTuple):
    """When a breaker opens, and for how long.

    Attributes:
        failures: Failures in a row that open it.
        open_s: How long it is open the first time, in seconds.
        max_open_s: The longest that the time gets by doubling, in seconds.
    """

    failures: int
    open_s: float
    max_open_s: float


class Breaker:
    """The breaker of one incarnation of one instance. All times are seconds of one monotonic clock.

    Attributes:
        trips: How often it has opened.
    """

    __slots__ = ("_open_s", "_opened_at", "_own", "_rules", "_shared", "_trial_until", "_until", "trips")

    def __init__(self, rules: BreakerRules) -> None:
        self.trips = 0
        self._rules = rules
        self._own = 0
        self._shared: dict[str, int] = {}
        self._open_s = 0.0
        self._until = -inf
        self._opened_at = -inf
        # The next trial may not begin before: inf while one is under way, -inf when there is none.
        self._trial_until = -inf

    @property
    def tripped(self) -> bool:
        """Whether it is anything but closed."""
        return self._open_s > 0

    @property
    def streak(self) -> int:
        """Failures since the last success, without the forgiven ones."""
        return self._own + sum(self._shared.values())

    @property
    def partners(self) -> int:
        """With how many partners it has failed since the last success, forgiven or not."""
        return len(self._shared)

    def phase(self, now: float) -> Phase:
        """What it is at `now`."""
        if not self.tripped:
            return Phase.CLOSED
        return Phase.OPEN if now < self._until else Phase.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may be sent at `now`."""
        return not self.tripped or (now >= self._until and now >= self._trial_until)

    def began(self, now: float) -> bool:
        """A request is sent at `now`.

        Returns:
            Whether it is the trial. Then `ended` has to be called when it is over, whatever its result.
        """
        if self.tripped and now >= self._until and now >= self._trial_until:
            self._trial_until = inf
            return True
        return False

    def ended(self, verdict_by: float | None = None) -> None:
        """The trial is over. Without a verdict on it the next request is a trial again.

        Args:
            verdict_by: When another trial may begin although there is no verdict; None if none is to come.
        """
        if self._trial_until == inf:
            self._trial_until = -inf if verdict_by is None else verdict_by

    def succeeded(self, began_at: float) -> None:
        """A request that began at `began_at` was served.

        One that began before the breaker opened proves nothing about the time since.
        """
        if began_at < self._opened_at:
            return
        self._own = 0
        if self._shared:
            self._shared.clear()
        self._close()

    def failed(self, began_at: float, now: float, partner: str | None = None) -> bool:
        """A request that began at `began_at` has failed at `now`.

        Args:
            began_at: One that began before the breaker opened does not count again.
            now: When it failed.
            partner: The instance at the other end, if that one may be at fault as well.

        Returns:
            Whether the breaker has opened because of it.
        """
        if began_at < self._opened_at or (self.tripped and now < self._until):
            return False
        if partner is None:
            self._own += 1
        else:
            self._shared[partner] = self._shared.get(partner, 0) + 1
        if self.tripped:
            self._open(now, min(self._open_s * 2, self._rules.max_open_s))
            return True
        if self.streak < self._rules.failures:
            return False
        self._open(now, min(self._rules.open_s, self._rules.max_open_s))
        return True

    def forgive(self, partner: str) -> None:
        """`partner` was found guilty: failures shared with it are taken back."""
        if self._shared.get(partner):
            self._shared[partner] = 0
            if self.tripped and self.streak < self._rules.failures:
                self._close()

    def _close(self) -> None:
        self._open_s = 0.0
        self._trial_until = -inf

    def _open(self, now: float, open_s: float) -> None:
        self._open_s = open_s
        self._opened_at = now
        self._until = now + open_s
        self._trial_until = -inf
        self.trips += 1
