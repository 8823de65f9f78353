"""One connection to an engine: an exchange at a time, with its deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol, cast

import httptools

from disagg.errors import UpstreamError, UpstreamProtocolError, UpstreamTimeoutError, UpstreamUnreachableError
from disagg.http.chunks import Taker
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.messages import Header
from disagg.http.origin import Origin
from disagg.http.response import Response

Progress = tuple[int, float, int]
"""How far a connection has come: exchanges, deadline, and bytes that went by unparsed."""

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Pool(Protocol):
    """The pool as its connections see it."""

    limits: ClientLimits

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        ...

    def give_back(self, connection: UpstreamConnection) -> None:
        """An exchange is complete and the connection can be used again."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        origin: The server that it leads to.
        exchanges: How many requests were sent on it.
        received: Something of the current answer has come.
        deadline: `loop.time()` at which the current exchange, or the idle connection, expires.
    """

    transport: asyncio.Transport

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self.origin = origin
        self.exchanges = 0
        self.received = False
        self.deadline = inf
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._times = LegTimes(inf, inf, inf)
        self._ends_at = inf
        self._waiter: asyncio.Future[Response] | None = None
        self._late: Callable[[Response], None] | None = None
        self._response: Response | None = None
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._status = 0
        self._in_head = True
        self._done = False
        self._keep_alive = False
        self._until_close = False
        self._paused = False
        self._taker: Taker | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._chunk_ended = False
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._waiter is not None or self._response is not None

    @property
    def progress(self) -> Progress:
        """Differs whenever something has come since: who sends is not dead."""
        # A deadline moves with each read that is parsed; a further exchange follows a complete answer.
        return self.exchanges, self.deadline, self._taker.size if self._taker is not None else 0

    @property
    def usable(self) -> bool:
        """Whether a kept connection can take another exchange."""
        return not self.transport.is_closing() and self.deadline > self._now()

    async def exchange(
        self,
        wire: bytes,
        times: LegTimes,
        linger: Callable[[], float] | None = None,
        late: Callable[[Response], None] | None = None,
    ) -> Response:
        """Send a request; return when the head and the first bytes of the body, or the end, have arrived.

        Args:
            wire: The request.
            times: Its limits.
            linger: See `Outgoing.linger`.
            late: See `Outgoing.late`.

        Raises:
            UpstreamError: If the engine closes, is silent for too long, or does not speak HTTP.
        """
        loop = asyncio.get_running_loop()
        now = self._now()
        self.exchanges += 1
        self.received = False
        self._times = times
        self._ends_at = now + times.total_s
        self.deadline = min(now + times.first_byte_s, self._ends_at)
        self._headers = []
        self._head_bytes = 0
        self._in_head = True
        self._done = False
        self._until_close = False
        self._chunk_ended = False
        if self.transport.is_closing():
            raise UpstreamUnreachableError(f"{self.origin.authority} has closed the connection.")
        waiter: asyncio.Future[Response] = loop.create_future()
        self._waiter = waiter
        self._late = late
        self.transport.write(wire)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The answer may have arrived in this turn of the loop, before or after the cancelling; a complete one has
            # given the connection back, and it may be another exchange's by now.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                (late or _close)(waiter.result())
            elif self._waiter is waiter and (linger is None or not self._linger(linger(), late or _close)):
                self.abort()
            raise

    def _linger(self, seconds: float, late: Callable[[Response], None]) -> bool:
        """Nobody waits for the answer any more; go on until it begins, for so many seconds at most.

        Returns:
            Whether there is something to go on with.
        """
        if seconds <= 0 or self.transport.is_closing():
            return False
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._waiter.add_done_callback(partial(_take_answer, late))
        self.deadline = min(self.deadline, loop.time() + seconds)
        return True

    def fail(self, error: UpstreamError) -> None:
        """End the exchange under way with an error, and close."""
        waiter, self._waiter = self._waiter, None
        response, self._response = self._response, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        elif response is not None:
            response.fail(error)
        self.abort()

    def abort(self) -> None:
        """Close at once; the engine sees it and ends what it does for this exchange."""
        self._taker = self._take = None
        self._waiter = None
        self._response = None
        self.deadline = inf
        self.transport.abort()

    def pass_chunks(self, taker: Taker | None) -> None:
        """Offer whole chunks to a taker with their framing, before they are parsed; None ends that."""
        self._taker = taker
        self._offer()

    def _offer(self) -> None:
        """Offer what comes next to the taker, if it begins where a chunk begins."""
        self._take = self._taker.take if self._taker is not None and self._chunk_ended else None

    def pause(self) -> None:
        """Stop reading: whoever reads the answer is slower than the engine, which is not the engine's fault."""
        if not self._paused:
            self._paused = True
            self.deadline = self._ends_at
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused:
            self._paused = False
            self._extend()
            self.transport.resume_reading()

    def expire(self) -> None:
        """A limit has passed: of the exchange, or of an idle connection."""
        if self._waiter is None and self._response is None:
            self.abort()
            return
        name = self.origin.authority
        now = self._now()
        if self._taker is not None and not self._paused:
            # Chunks that were taken have not moved the deadline.
            deadline = min(now - self._taker.silent_s() + self._times.idle_s, self._ends_at)
            if deadline > now:
                self.deadline = deadline
                return
        if now >= self._ends_at:
            text = f"{name} has not finished within {self._times.total_s:g} s."
        elif self._waiter is not None:
            text = f"{name} has not begun to answer within {self._times.first_byte_s:g} s."
        else:
            text = f"{name} has been silent for {self._times.idle_s:g} s."
        self.fail(UpstreamTimeoutError(text))

    def _extend(self) -> None:
        deadline = self._now() + self._times.idle_s
        self.deadline = deadline if deadline < self._ends_at else self._ends_at

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        take = self._take
        if take is not None and take(data):
            return
        self.received = True
        if self._waiter is None and self._response is None:
            # Nobody asked: what comes next on this connection could be taken for another request's answer.
            self.abort()
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._flush()
            self.fail(UpstreamProtocolError(f"{self.origin.authority} did not answer in HTTP/1.1: {error}."))
            return
        if self._in_head and self._head_bytes > self._pool.limits.max_header_bytes:
            self.fail(UpstreamProtocolError(f"{self.origin.authority} sent headers without end."))
            return
        # Part of the next chunk's size may have come with it: then the end of the data is no line end.
        self._chunk_ended = self._chunk_ended and data.endswith(b"\r\n")
        self._offer()
        self._flush()

    def _flush(self) -> None:
        """Pass on what the last read has brought."""
        parts = self._parts
        response = self._response
        if response is not None and (parts or self._done):
            waiter, self._waiter = self._waiter, None
            if parts:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                if not self._done and not self._paused:
                    self._extend()
                response.deliver(data)
            if self._done:
                self._finish(response)
            if waiter is None:
                return
            if waiter.done():
                # Whoever waited has just been cancelled, and does not know yet that there is an answer.
                (self._late or _close)(response)
            else:
                waiter.set_result(response)

    def _finish(self, response: Response) -> None:
        self._response = None
        self._taker = self._take = None
        response.finish()
        self.resume()
        if self._keep_alive and not self._until_close:
            self._pool.give_back(self)
        else:
            self.abort()

    def eof_received(self) -> bool:
        """The engine will send no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._pool.closed(self)
        response = self._response
        if response is not None and self._until_close and exc is None:
            self._done = True
            self._flush()
        elif self._waiter is not None or response is not None:
            where = "in the middle of its answer" if response is not None else "before it answered"
            self.fail(UpstreamUnreachableError(f"{self.origin.authority} closed the connection {where}."))

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """A status line follows."""
        if self._done:
            # A second answer to one request: the connection is out of step.
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer, which is dropped."""
        if self._in_head and not self._done:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._done:
            return
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return
        self._in_head = False
        self._keep_alive = self._parser.should_keep_alive()
        self._until_close = self._status not in {204, 304}
        for name, _ in self._headers:
            if name in _FRAMING:
                self._until_close = False
        self._response = Response(self, self._status, self._headers)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self._done:
            self._parts.append(data)

    def on_chunk_header(self) -> None:
        """A chunk follows."""
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        """A chunk is complete."""
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was an interim one (100 Continue, 103 Early Hints)."""
        if self._done:
            return
        if self._status < 200:
            self._headers = []
        else:
            self._done = True


def _take_answer(late: Callable[[Response], None], waiter: asyncio.Future[Response]) -> None:
    """The answer that nobody waits for has begun, or failed."""
    if not waiter.cancelled() and waiter.exception() is None:
        late(waiter.result())


def _close(response: Response) -> None:
    response.close()
