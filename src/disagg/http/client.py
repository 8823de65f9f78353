"""The client side: a pool of kept connections per origin, and one exchange at a time on each.

::

    response = await client.request(origin, Outgoing(...), times)     # head and first body bytes are here
    body = await response.read(limit)                                 # either the whole body
    await response.relay(sink)                                        # or every piece as it arrives
    response.close()                                                  # always; cancels what is not complete
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping

from disagg.errors import UpstreamError, UpstreamUnreachableError
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.origin import Origin, Outgoing
from disagg.http.response import Response
from disagg.http.sweeper import Sweeper
from disagg.http.tls import client_tls
from disagg.http.upstream import Progress, UpstreamConnection


class Client:
    """Connections to any number of origins. Bound to the event loop in which it is first used."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.sweeper = Sweeper(self.limits.tick_s)
        # By URL: the hash of a string is computed once, that of an origin each time.
        self._idle: dict[str, deque[UpstreamConnection]] = {}
        self._open: set[UpstreamConnection] = set()

    @property
    def open_connections(self) -> int:
        """Connections that are open, in use or kept."""
        return len(self._open)

    @property
    def busy_connections(self) -> int:
        """Connections with an exchange under way."""
        return len(self._open) - sum(len(idle) for idle in self._idle.values())

    async def request(
        self,
        origin: Origin,
        outgoing: Outgoing,
        times: LegTimes,
        before_send: Callable[[], None] | None = None,
    ) -> Response:
        """Send a request and wait for the head and the first bytes of the answer's body.

        Args:
            origin: Where to.
            outgoing: What.
            times: Limits of this exchange; time to connect is the client's own limit.
            before_send: Called when the connection stands and the request is about to leave. What it raises ends
                the exchange with nothing sent.

        Raises:
            UpstreamUnreachableError: If the engine refuses, resets or closes the connection.
            UpstreamTimeoutError: If it does not answer in time.
            UpstreamProtocolError: If what it sends is not HTTP.
        """
        wire = outgoing.encode(origin)
        connection = self._take_idle(origin) or await self._connect(origin, times.total_s)
        while True:
            if before_send is not None:
                try:
                    before_send()
                except BaseException:
                    self.give_back(connection)
                    raise
            reused = connection.exchanges > 0
            try:
                return await connection.exchange(wire, times, outgoing.linger, outgoing.late)
            except UpstreamUnreachableError:
                if not (reused and outgoing.resend and not connection.received):
                    raise
                connection = await self._connect(origin, times.total_s)

    def _take_idle(self, origin: Origin) -> UpstreamConnection | None:
        idle = self._idle.get(origin.url)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self, origin: Origin, total_s: float) -> UpstreamConnection:
        limit_s = min(self.limits.connect_timeout_s, total_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=client_tls() if origin.tls else None,
                )
        except TimeoutError as error:
            raise UpstreamUnreachableError(
                f"{origin.authority} did not accept a connection in {limit_s:g} s."
            ) from error
        except ssl.CertificateError as error:
            raise UpstreamUnreachableError(
                f"{origin.authority} shows a certificate that is not trusted: {error.verify_message}.",
                hint="Name the authority that signed it in SSL_CERT_FILE.",
            ) from error
        except OSError as error:
            raise UpstreamUnreachableError(f"{origin.authority} cannot be reached: {error}.") from error
        if not connection.transport.is_closing():
            # Only now: one whose request is cancelled while it is being made is closed by the loop, and uvloop does
            # not tell its protocol.
            self._open.add(connection)
            self.sweeper.add(connection)
        return connection

    # What connections tell.

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self.sweeper.discard(connection)
        idle = self._idle.get(connection.origin.url)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        """An exchange is complete: keep the connection for the next one."""
        idle = self._idle.get(connection.origin.url)
        if idle is None:
            idle = self._idle[connection.origin.url] = deque()
        if len(idle) >= self.limits.max_idle:
            connection.abort()
            return
        connection.deadline = asyncio.get_running_loop().time() + self.limits.idle_limit_s
        idle.append(connection)

    def forget(self, origin: Origin, error: UpstreamError) -> None:
        """The server at an origin is gone: close kept connections to it, and end exchanges under way with `error`."""
        self._idle.pop(origin.url, None)
        for connection in [c for c in self._open if c.origin == origin]:
            connection.fail(error)

    def marks(self, origin: Origin | None = None) -> dict[UpstreamConnection, Progress]:
        """Where each exchange with a server stands, for `moved`; with all servers if none is named."""
        return {c: c.progress for c in self._open if c.busy and (origin is None or c.origin == origin)}

    def moved(self, marks: Mapping[UpstreamConnection, Progress]) -> bool:
        """Whether anything has come since `marks` in an exchange that was under way then: who sends is not dead."""
        return any(c in self._open and c.progress != mark for c, mark in marks.items())

    def moved_origins(self, marks: Mapping[UpstreamConnection, Progress]) -> set[Origin]:
        """The servers from which anything has come since `marks`."""
        return {c.origin for c, mark in marks.items() if c in self._open and c.progress != mark}

    async def close(self) -> None:
        """Close all connections; exchanges under way fail."""
        for connection in tuple(self._open):
            connection.fail(UpstreamUnreachableError("The client was closed."))
        self._idle.clear()
        # One turn of the loop, in which aborted transports tell their connections.
        await asyncio.sleep(0)
