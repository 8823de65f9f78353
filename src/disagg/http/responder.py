"""What a handler answers with."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from disagg.http.messages import Answer, Header, Request

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode("ascii")) for s in HTTPStatus}


class Channel(Protocol):
    """The connection as its responder sees it."""

    transport: asyncio.Transport
    closing: bool
    """The connection takes no further request after this one."""
    writable: bool
    """False while the client reads too slowly."""

    def date(self) -> bytes:
        """The current `Date` header line."""
        ...


class Responder:
    """Writes one answer. Writes never block; a handler that sends much awaits `drain` or uses `on_flow`.

    A handler either calls `send` once, or `start`, any number of `write`, and `finish`.
    When the client leaves, the callback given to `on_disconnect` runs and then the handler's task is cancelled.

    Attributes:
        started: The client has been sent at least the status line.
        finished: The answer is complete, or was given up.
        status: The status sent, 0 before that.
    """

    __slots__ = (
        "_bare",
        "_channel",
        "_chunked",
        "_flow",
        "_keep_alive",
        "_on_disconnect",
        "_request",
        "_resumed",
        "finished",
        "started",
        "status",
    )

    def __init__(self, channel: Channel, request: Request) -> None:
        self._channel = channel
        self._request = request
        self._keep_alive = request.keep_alive
        self._chunked = False
        self._bare = False
        self._on_disconnect: Callable[[], None] | None = None
        self._flow: Callable[[bool], None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self.started = False
        self.finished = False
        self.status = 0

    @property
    def connected(self) -> bool:
        """Whether the client is still there."""
        return not self._channel.transport.is_closing()

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection is used again after this answer."""
        return self._keep_alive and not self._channel.closing

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the client has left before the answer was complete. One callback per answer."""
        self._on_disconnect = callback

    def on_flow(self, callback: Callable[[bool], None] | None) -> None:
        """Call `callback(False)` when the client reads too slowly and `callback(True)` when it has caught up."""
        self._flow = callback
        if callback is not None and not self._channel.writable:
            callback(False)

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Send a whole answer."""
        self._begin(status, headers, len(body), body)
        self._end()

    def send_answer(self, answer: Answer) -> None:
        """Send a whole answer that was made elsewhere."""
        self.send(answer.status, answer.body, answer.headers)

    def start(
        self, status: int, headers: Iterable[Header] = (), *, length: int | None = None, first: bytes = b""
    ) -> None:
        """Send the head of an answer, with its first bytes in the same packet.

        Args:
            status: HTTP status code.
            headers: Headers except length, date and connection, which are set here.
            length: Length of the whole body in bytes, if known; else the body is chunked.
            first: First bytes of the body.
        """
        self._begin(status, headers, length, first)

    def write(self, data: bytes) -> None:
        """Send more of the body. Nothing happens once the client is gone."""
        if self.finished or not data or self._bare:
            return
        if self._chunked:
            self._channel.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._channel.transport.write(data)

    def framed_writer(self) -> Callable[[bytes], object] | None:
        """What sends more of the body that is framed as chunks already; None if this answer is not sent in chunks.

        It must not be called once the answer is `finished`.
        """
        return self._channel.transport.write if self._chunked and not self._bare else None

    async def drain(self) -> None:
        """Wait until the client has read enough to be sent more."""
        while not self._channel.writable and not self.finished:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await self._resumed

    def finish(self, last: bytes = b"") -> None:
        """End the answer, with its last bytes in the same packet."""
        if self.finished:
            return
        if self._chunked and not self._bare:
            tail = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
            self._channel.transport.write(tail)
        else:
            self.write(last)
        self._end()

    def abort(self) -> None:
        """Give the answer up and close the connection, so that the client sees that it is not complete."""
        if not self.finished:
            self._keep_alive = False
            self.finished = True
            self._channel.transport.abort()
            self._wake()

    def reset(self) -> None:
        """The same with a TCP reset, as when the process is gone."""
        found = self._channel.transport.get_extra_info("socket")
        if found is not None and not self.finished:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    def _begin(self, status: int, headers: Iterable[Header], length: int | None, first: bytes) -> None:
        if self.started:
            raise RuntimeError("an answer was started twice")
        self.started = True
        self.status = status
        request = self._request
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        parts = [line, self._channel.date()]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        # These statuses have no body by definition, and HEAD asks for none.
        self._bare = request.method == "HEAD" or status in {204, 304}
        if length is not None:
            if status != 204:
                parts.append(b"content-length: %d\r\n" % length)
        elif request.http_1_0:
            self._keep_alive = False
        elif not self._bare:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keeps_connection:
            self._keep_alive = False
            parts.append(b"connection: close\r\n")
        elif request.http_1_0:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        if first and not self._bare:
            if self._chunked:
                parts.append(b"%x\r\n%b\r\n" % (len(first), first))
            else:
                parts.append(first)
        self._channel.transport.write(b"".join(parts))

    def _end(self) -> None:
        self.finished = True
        self._flow = None
        self._on_disconnect = None

    # What the connection tells.

    def flow_changed(self, writable: bool) -> None:
        """The client reads too slowly, or has caught up."""
        if self._flow is not None:
            self._flow(writable)
        if writable:
            self._wake()

    def client_left(self) -> None:
        """The connection is gone."""
        callback = self._on_disconnect
        unfinished = not self.finished
        self._end()
        self._wake()
        if callback is not None and unfinished:
            callback()

    def _wake(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None
