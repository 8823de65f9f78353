"""What the router needs of a tracer. Only `disagg.router.tracing` knows a real one, and is imported if it is used."""

from __future__ import annotations

from typing import Protocol

from disagg.engines.base import Body
from disagg.http.messages import Request
from disagg.http.origin import Outgoing
from disagg.router.fleet import Member
from disagg.router.record import Record


class LegSpan(Protocol):
    """The span of one leg."""

    def primes(self) -> None:
        """The leg only fetches KV for another one."""
        ...

    def end(self, outcome: str, status: int) -> None:
        """The leg is over.

        Args:
            outcome: How it ended, as in the metrics.
            status: HTTP status of its answer; 0 without one.
        """
        ...


class RequestSpan(Protocol):
    """The span of one client request; legs that begin before its end are its children.

    Attributes:
        trace_id: 32 hexadecimal digits.
    """

    trace_id: str

    def asked(self, body: Body) -> None:
        """The request was read and may be served."""
        ...

    def end(self, record: Record) -> None:
        """The request is over. Called in the task in which the span was made."""
        ...


class Tracer(Protocol):
    """Makes spans and sends them away."""

    def request(self, request: Request) -> RequestSpan:
        """A client's request has come; its own trace context is continued."""
        ...

    def leg(self, member: Member, outgoing: Outgoing) -> tuple[LegSpan, Outgoing]:
        """A leg is about to be sent.

        Returns:
            Its span, and the request with the context of this span in place of the client's.
        """
        ...

    async def close(self) -> None:
        """Send what is left."""
        ...
