"""The door's permits: so many requests are served at once, so many more wait their turn, the rest is told when to
come back.

A permit is held until the request's end. As long as nobody waits, taking one is a comparison and an addition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg.errors import OverloadedError, QueueTimeoutError
from disagg.policy.admission import Pace, WaitingLine
from disagg.router.metrics import Metrics
from disagg.topology.router_spec import Router as RouterSpec


class Admission:
    """Permits of one router.

    ::

        if admission.running < admission.limit:      # nobody waits while there is room
            admission.running += 1
        else:
            await admission.wait(priority)
        try: ...
        finally: admission.leave()

    Args:
        spec: `max_in_flight`, `max_queue`, `queue_timeout_s`.
        metrics: Where depth and waiting times are counted.
        now: Monotonic seconds.
    """

    def __init__(self, spec: RouterSpec, metrics: Metrics, now: Callable[[], float]) -> None:
        self.running = 0
        self.limit = spec.max_in_flight
        self._timeout_s = spec.queue_timeout_s
        self._line: WaitingLine[asyncio.Future[None]] = WaitingLine(spec.max_queue)
        self._pace = Pace()
        self._metrics = metrics
        self._now = now

    @property
    def waiting(self) -> int:
        """Requests that wait for a permit."""
        return len(self._line)

    def change(self, spec: RouterSpec) -> None:
        """Take new limits at once. Requests that are served or wait keep their place, also above a lower limit."""
        self.limit = spec.max_in_flight
        self._line.limit = spec.max_queue
        self._timeout_s = spec.queue_timeout_s
        while self.running < self.limit and self._hand_over():
            self.running += 1

    async def wait(self, priority: int = 0) -> None:
        """Wait for a permit; on return it is held.

        Args:
            priority: Lower is more urgent.

        Raises:
            OverloadedError: If the queue is full, at once; or as soon as a more urgent request takes the place.
            QueueTimeoutError: If no permit came free in time.
        """
        began_s = self._now()
        if not self._line:
            self._pace.begin(began_s)
        loop = asyncio.get_running_loop()
        ticket: asyncio.Future[None] = loop.create_future()
        ousted = self._line.add(ticket, priority)
        if ousted is not None:
            if ousted is ticket:
                raise self._full()
            ousted.set_exception(self._full())
        self._metrics.queued = len(self._line)
        expiry = loop.call_later(self._timeout_s, self._expire, ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                # The permit came in the same turn of the loop in which the client left: it goes to the next one.
                self.leave()
            raise
        finally:
            expiry.cancel()
            self._line.discard(ticket)
            self._metrics.queued = len(self._line)
            self._metrics.queue_left(self._now() - began_s)

    def leave(self) -> None:
        """Give a permit back: whoever is next in the queue has it now."""
        if self._line and self.running <= self.limit:
            self._pace.departed(self._now())
            if self._hand_over():
                return
        self.running -= 1

    def _hand_over(self) -> bool:
        ticket = self._line.take()
        while ticket is not None and ticket.done():
            ticket = self._line.take()
        if ticket is None:
            return False
        ticket.set_result(None)
        return True

    def _expire(self, ticket: asyncio.Future[None]) -> None:
        if self._line.discard(ticket) and not ticket.done():
            ticket.set_exception(
                QueueTimeoutError(
                    f"The request waited {self._timeout_s:g} s and was not begun: {self.limit} others are served.",
                    hint="Try again later.",
                    retry_after_s=self._pace.retry_after_s(len(self._line)),
                )
            )

    def _full(self) -> OverloadedError:
        waiting = len(self._line)
        queue = f" and {waiting} wait" if waiting else ""
        return OverloadedError(
            f"{self.running} requests are served{queue}, which is the limit.",
            hint="Try again later; router.max_in_flight and router.max_queue set the limits.",
            retry_after_s=self._pace.retry_after_s(waiting),
        )
