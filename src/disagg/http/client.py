"""The client side: a pool of kept connections per origin, and one exchange at a time on each.

::

    response = await client.request(origin, Outgoing(...), times)     # head and first body bytes are here
    body = await response.read(limit)                                 # either the whole body
    await response.relay(sink)                                        # or every piece as it arrives
    response.close()                                                  # always; cancels what is not complete
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Self
from urllib.parse import urlsplit

from disagg.errors import UpstreamUnreachableError
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.messages import Header
from disagg.http.sweeper import Sweeper
from disagg.http.upstream import Response, UpstreamConnection


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an HTTP server is.

    Attributes:
        host: Name or address, without brackets.
        port: TCP port.
        authority: ``host:port`` as it stands in the `Host` header.
    """

    host: str
    port: int
    authority: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read the origin of a URL such as ``http://[::1]:9900``.

        Raises:
            ValueError: If it is not an ``http`` URL with a host.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// URL")
        port = parts.port or 80
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(parts.hostname, port, f"{host}:{port}")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to an engine.

    Attributes:
        method: Upper-case method.
        target: Path and query.
        headers: Headers except `Host` and `Content-Length`.
        body: The whole body.
        resend: The request may be sent a second time when a kept connection turns out to have been closed
            before anything of an answer came.
    """

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    resend: bool = True

    def encode(self, origin: Origin) -> bytes:
        """The bytes on the wire."""
        parts = [f"{self.method} {self.target} HTTP/1.1\r\nhost: {origin.authority}\r\n".encode("latin-1")]
        for name, value in self.headers:
            parts += (name, b": ", value, b"\r\n")
        if self.body or self.method not in {"GET", "HEAD", "DELETE"}:
            parts.append(b"content-length: %d\r\n" % len(self.body))
        parts += (b"\r\n", self.body)
        return b"".join(parts)


class Client:
    """Connections to any number of origins. Bound to the event loop in which it is first used."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.sweeper = Sweeper(self.limits.tick_s)
        self._idle: dict[Origin, deque[UpstreamConnection]] = {}
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
                return await connection.exchange(wire, times)
            except UpstreamUnreachableError:
                if not (reused and outgoing.resend and not connection.received):
                    raise
                connection = await self._connect(origin, times.total_s)

    def _take_idle(self, origin: Origin) -> UpstreamConnection | None:
        idle = self._idle.get(origin)
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
                    lambda: UpstreamConnection(self, origin), origin.host, origin.port
                )
        except TimeoutError as error:
            raise UpstreamUnreachableError(f"{origin.authority} did not accept a connection in {limit_s:g} s.") from error
        except OSError as error:
            raise UpstreamUnreachableError(f"{origin.authority} cannot be reached: {error}.") from error
        return connection

    # What connections tell.

    def opened(self, connection: UpstreamConnection) -> None:
        """A connection stands."""
        self._open.add(connection)
        self.sweeper.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self.sweeper.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def give_back(self, connection: UpstreamConnection) -> None:
        """An exchange is complete: keep the connection for the next one."""
        idle = self._idle.setdefault(connection.origin, deque())
        if len(idle) >= self.limits.max_idle:
            connection.abort()
            return
        connection.deadline = asyncio.get_running_loop().time() + self.limits.idle_limit_s
        idle.append(connection)

    def forget(self, origin: Origin) -> None:
        """Close kept connections to an origin whose server has been replaced or is gone."""
        for connection in tuple(self._idle.pop(origin, ())):
            connection.abort()

    async def close(self) -> None:
        """Close all connections; exchanges under way fail."""
        for connection in tuple(self._open):
            connection.deadline = inf
            connection.abort()
        self._idle.clear()
        # One turn of the loop, in which aborted transports tell their connections.
        await asyncio.sleep(0)
