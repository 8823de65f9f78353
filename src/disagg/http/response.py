"""An answer that may still be arriving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from disagg.errors import UpstreamError, UpstreamProtocolError
from disagg.http.chunks import Taker
from disagg.http.messages import Header, find_header

# Body bytes that wait for a reader before the engine is no longer read.
_MAX_BUFFERED = 256 * 1024


class Source(Protocol):
    """The connection as its response sees it."""

    def pass_chunks(self, taker: Taker | None) -> None:
        """Offer whole chunks to a taker with their framing, before they are parsed; None ends that."""
        ...

    def pause(self) -> None:
        """Read no more for now."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


class Response:
    """Status and headers, and a body that is read whole, relayed as it arrives, or iterated over.

    Attributes:
        status: HTTP status code.
        headers: Header lines in the order sent, names in lower case.
        complete: The last byte has arrived.
    """

    __slots__ = (
        "_buffered",
        "_chunks",
        "_error",
        "_paused",
        "_sink",
        "_source",
        "_waiter",
        "complete",
        "headers",
        "status",
    )

    def __init__(self, source: Source, status: int, headers: list[Header]) -> None:
        self.status = status
        self.headers = headers
        self.complete = False
        self._source: Source | None = source
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._error: UpstreamError | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (name in lower case), or None."""
        return find_header(self.headers, name)

    async def read(self, limit: int = 64 * 1024**2) -> bytes:
        """Wait for the whole body.

        Raises:
            UpstreamError: If the rest does not arrive, or is more than `limit` bytes.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            if self._chunks:
                chunk = self._take()
                size += len(chunk)
                if size > limit:
                    self.close()
                    raise UpstreamProtocolError(f"The engine's answer is over {limit} bytes.")
                parts.append(chunk)
                self._unblock()
            if self.complete:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            await self._wait()

    async def relay(self, sink: Callable[[bytes], None], taker: Taker | None = None) -> None:
        """Call `sink` with every piece of the body as it arrives, in the reader's own callback; return at the end.

        Args:
            sink: Takes the bytes of the body.
            taker: Is offered what comes where a chunk begins, framing included, before it is parsed. What it takes
                does not reach `sink`.

        Raises:
            UpstreamError: If the rest does not arrive. What has arrived before was given to `sink`.
        """
        if self._chunks:
            data = self._take()
            self._unblock()
            sink(data)
        self._sink = sink
        if self._source is not None:
            self._source.pass_chunks(taker)
        try:
            while not self.complete:
                await self._wait()
        finally:
            self._sink = None
            if self._source is not None:
                self._source.pass_chunks(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive."""
        while True:
            if self._chunks:
                data = self._take()
                self._unblock()
                yield data
            elif self.complete:
                return
            else:
                await self._wait()

    def close(self) -> None:
        """Give the answer up if it is not complete: the engine sees the connection close."""
        source, self._source = self._source, None
        self._chunks.clear()
        if source is not None:
            source.abort()

    def pause(self) -> None:
        """Let the engine wait: its bytes are not read until `resume`."""
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        """Read on after `pause`."""
        if self._source is not None:
            self._source.resume()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiter = None

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        return data

    def _unblock(self) -> None:
        if self._paused:
            self._paused = False
            self.resume()

    # What the connection tells.

    def deliver(self, data: bytes) -> None:
        """More of the body."""
        if self._sink is not None:
            self._sink(data)
            return
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > _MAX_BUFFERED and not self._paused:
            self._paused = True
            self.pause()
        self._wake()

    def finish(self) -> None:
        """The body is complete; the connection belongs to the pool again."""
        self.complete = True
        self._source = None
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """The rest will not come."""
        self._error = error
        self._source = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
