"""The HTTP server: one protocol object per connection, one task per request."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from math import inf
from typing import cast

from disagg.errors import DisaggError, PreparationError, RequestTimeoutError
from disagg.http.limits import ServerLimits
from disagg.http.messages import Answer, Request, error_answer
from disagg.http.reader import Phase, RequestReader
from disagg.http.responder import Responder
from disagg.http.sweeper import Sweeper

Handler = Callable[[Request, Responder], Awaitable[None]]
"""Answers one request. Its task is cancelled when the client leaves. A `DisaggError` that it raises before it has
started an answer becomes that error's answer."""

log = logging.getLogger("disagg.http")

# Bytes of further requests that a client may send ahead of its answers before it is no longer read.
_MAX_AHEAD = 64 * 1024
# How long the rest of a refused request is read and dropped: closing at once would reset the connection, and the
# client would lose the answer that tells it why.
_LINGER_S = 1.0


class Server:
    """Listens, and calls one handler for each request.

    Args:
        handler: Answers one request.
        limits: Sizes and times per connection.
        refusal: Makes the answer to what could not be read as a request.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        refusal: Callable[[DisaggError], Answer] = error_answer,
    ) -> None:
        self.handler = handler
        self.refusal = refusal
        self.limits = limits or ServerLimits()
        self.sweeper = Sweeper(self.limits.tick_s)
        self.connections: set[ServerConnection] = set()
        self.closing = False
        self._listener: asyncio.Server | None = None
        self._empty: asyncio.Future[None] | None = None
        self._date_second = 0
        self._date = b""

    async def start(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, shared: bool = False) -> None:
        """Listen on `host` and `port` (0 takes a free one, see `port`).

        Args:
            host: Address or name to listen on.
            port: TCP port.
            tls: Speak TLS with this.
            shared: Other processes listen on the same port, and the kernel spreads connections over them.

        Raises:
            PreparationError: If the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: ServerConnection(self),
                host,
                port,
                backlog=2048,
                ssl=tls,
                ssl_handshake_timeout=self.limits.head_timeout_s if tls is not None else None,
                reuse_port=shared or None,
            )
        except (OSError, OverflowError, ValueError) as error:  # ValueError: not even the form of a host name
            raise PreparationError(
                f"Cannot listen on {host} port {port}: {error}.",
                hint="Choose another --port, or stop what uses it.",
            ) from error

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before `start`."""
        sockets = self._listener.sockets if self._listener is not None else ()
        return int(sockets[0].getsockname()[1]) if sockets else 0

    @property
    def active(self) -> int:
        """Number of requests that are being answered."""
        return sum(c.busy for c in self.connections)

    async def drain(self, timeout_s: float) -> bool:
        """Stop listening, close idle connections, and wait for requests that are under way.

        Returns:
            Whether all of them ended within `timeout_s` seconds.
        """
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in tuple(self.connections):
            connection.wind_down()
        if self.connections:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._empty,), timeout=timeout_s)
        return not self.connections

    async def stop(self) -> None:
        """Close everything at once; handlers that still run are cancelled and waited for."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in tuple(self.connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One turn of the loop, in which aborted transports tell their connections.
        await asyncio.sleep(0)

    def date_line(self) -> bytes:
        """The `Date` header line, made once a second."""
        second = int(time.time())
        if second != self._date_second:
            self._date_second = second
            self._date = b"date: %b\r\n" % formatdate(second, usegmt=True).encode("ascii")
        return self._date

    def forget(self, connection: ServerConnection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        self.sweeper.discard(connection)
        if not self.connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)


class ServerConnection(asyncio.Protocol):
    """One client connection. Requests are answered one after the other, in the order sent."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader: RequestReader
        self._responder: Responder | None = None
        self._ahead: list[bytes] = []
        self._ahead_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.deadline = inf
        self.closing = False
        self.writable = True
        self._refused = False

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._responder is not None

    def date(self) -> bytes:
        """The current `Date` header line."""
        return self._server.date_line()

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._reader = RequestReader(self._server.limits, str(peer[0]) if peer else "")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections.add(self)
        self._server.sweeper.add(self)
        self.deadline = self._now() + self._server.limits.idle_timeout_s
        if self._server.closing:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of a later one while an answer is under way."""
        if self._refused:
            return
        if self._responder is not None:
            self._ahead.append(data)
            self._ahead_bytes += len(data)
            if self._ahead_bytes > _MAX_AHEAD:
                self.transport.pause_reading()
            return
        self._feed(data)

    def eof_received(self) -> bool:
        """The client has closed its side: it counts as gone, as it does for the engines' own servers."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._server.forget(self)
        self._ahead.clear()
        responder, self._responder = self._responder, None
        if responder is not None:
            responder.client_left()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is sent to."""
        self.writable = False
        self.deadline = self._now() + self._server.limits.write_stall_s
        if self._responder is not None:
            self._responder.flow_changed(False)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.writable = True
        self.deadline = inf if self._responder is not None else self._now() + self._server.limits.idle_timeout_s
        if self._responder is not None:
            self._responder.flow_changed(True)

    # Deadlines and closing.

    def expire(self) -> None:
        """A time limit has passed: of the request being read, of an unread answer, or of an idle connection."""
        self.deadline = inf
        if self._refused or not self.writable or self._reader.phase is Phase.IDLE:
            self.transport.abort()
        else:
            self._refuse(RequestTimeoutError("The request was not complete in time."))

    def wind_down(self) -> None:
        """Take no further request; close at once if none is under way."""
        self.closing = True
        if self._responder is None:
            self.transport.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # Requests.

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        before = reader.phase
        reader.feed(data)
        if reader.requests:
            self._begin(reader.requests.popleft())
        elif reader.refusal is not None:
            self._refuse(reader.refusal)
        else:
            self._await_rest(before)

    def _await_rest(self, before: Phase) -> None:
        """Part of a request is here: give the rest its time."""
        reader = self._reader
        limits = self._server.limits
        if reader.phase is not before:
            self.deadline = self._now() + (
                limits.head_timeout_s if reader.phase is Phase.HEAD else limits.body_timeout_s
            )
        if reader.wants_continue:
            reader.wants_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, request: Request) -> None:
        self.deadline = inf
        request.received_at = self._now()
        responder = Responder(self, request)
        self._responder = responder
        self.task = asyncio.get_running_loop().create_task(self._run(request, responder))

    async def _run(self, request: Request, responder: Responder) -> None:
        try:
            await self._server.handler(request, responder)
        except DisaggError as error:
            if responder.started:
                log.warning("%s %s failed after its answer had begun: %s", request.method, request.path, error)
            else:
                responder.send_answer(error_answer(error))
        except Exception:  # the edge: one request's bug must not end the server
            log.exception("%s %s failed", request.method, request.path)
            if not responder.started:
                responder.send_answer(error_answer(DisaggError("Internal server error")))
        finally:
            if not responder.finished:
                # Includes a handler that returned without an answer: the client must not wait for one.
                responder.abort()
            self.task = None
        self._next(responder)

    def _next(self, responder: Responder) -> None:
        """An answer is complete: begin the next request, if the client has sent it already."""
        if self._responder is not responder:
            return
        self._responder = None
        if not responder.keeps_connection:
            # Closes once the client has read everything, for which it has as long as for any answer.
            self.deadline = self._now() + self._server.limits.write_stall_s
            self.transport.close()
            return
        self.deadline = self._now() + self._server.limits.idle_timeout_s
        reader = self._reader
        if reader.requests:
            self._begin(reader.requests.popleft())
        elif reader.refusal is not None:
            self._refuse(reader.refusal)
        elif self._ahead:
            data = b"".join(self._ahead)
            self._ahead.clear()
            if self._ahead_bytes > _MAX_AHEAD:
                self.transport.resume_reading()
            self._ahead_bytes = 0
            self._feed(data)
        elif reader.phase is not Phase.IDLE:
            self._await_rest(Phase.IDLE)

    def _refuse(self, error: DisaggError) -> None:
        """Answer a request that could not be read, and close: what follows it cannot be trusted."""
        self._refused = True
        self.closing = True
        request = Request("", "", "", [], keep_alive=False)
        Responder(self, request).send_answer(self._server.refusal(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.deadline = self._now() + _LINGER_S
