"""The client side of the router benchmark: whole requests back to back, and streams that are counted as they arrive.

As a program (`python -m benchmarks.router_load PORT STREAMS EVENTS PACE_MS`) it opens that many streams at once
and prints how many were open when the last one had begun, how many ended well, and which errors there were.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from functools import partial
from typing import cast

import uvloop

from benchmarks.static_backend import WHOLE_END

_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"authorization: Bearer key\r\n\r\n"
)


def request(number: int, events: int, pace_ms: int, *, stream: bool) -> bytes:
    """One client's request: a prompt of 200 words, half of them shared by all clients."""
    prompt = "word " * 100 + f"number{number} " * 100
    fields: dict[str, object] = {"model": "m", "prompt": prompt, "max_tokens": events, "temperature": 0}
    fields["seed"] = pace_ms
    if stream:
        fields["stream"] = True
    body = json.dumps(fields, separators=(",", ":")).encode()
    return _HEAD % len(body) + body


class _Load(asyncio.Protocol):
    """Sends a request again and again on one connection, and times each answer."""

    def __init__(self, wire: bytes, count: int) -> None:
        self._wire = wire
        self._left = count
        self._tail = b""
        self.seconds: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self) -> None:
        self._tail = b""
        self._started = time.perf_counter()
        self._transport.write(self._wire)

    def data_received(self, data: bytes) -> None:
        if self._tail == b"" and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"unexpected answer: {data[:200]!r}")
            return
        self._tail = (self._tail + data)[-64:]
        if not self._tail.endswith(WHOLE_END):
            return
        self.seconds.append(time.perf_counter() - self._started)
        self._left -= 1
        if self._left:
            self.send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed in mid-answer")

    def _fail(self, text: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(text))
            self._transport.abort()


async def drive(port: int, connections: int, each: int) -> list[float]:
    """Send `each` requests on each of some connections; seconds of every request."""
    loop = asyncio.get_running_loop()
    loads = [
        (await loop.create_connection(partial(_Load, request(n, 64, 0, stream=False), each), "127.0.0.1", port))[1]
        for n in range(connections)
    ]
    for load in loads:
        load.send()
    await asyncio.gather(*(load.done for load in loads))
    return [s for load in loads for s in load.seconds]


class Streams:
    """Many streams at once.

    Attributes:
        events: Events that have arrived, over all streams.
        begun: Done when each stream has had an event, or has failed.
        errors: What went wrong, and how often.
        ended: Done when none is open any more.
        complete: Streams that ended with the terminator.
    """

    def __init__(self, port: int, count: int, events: int, pace_ms: int) -> None:
        loop = asyncio.get_running_loop()
        self._port = port
        self._wires = [request(n, events, pace_ms, stream=True) for n in range(count)]
        self._streams: list[_Stream] = []
        self._waiting = count
        self._open = count
        self.events = 0
        self.complete = 0
        self.errors: Counter[str] = Counter()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    async def open(self) -> None:
        """Open all streams."""
        loop = asyncio.get_running_loop()
        for wire in self._wires:
            _, stream = await loop.create_connection(partial(_Stream, self, wire), "127.0.0.1", self._port)
            self._streams.append(stream)

    async def leave(self) -> None:
        """Close all streams that are still open, whether they are complete or not."""
        for stream in self._streams:
            stream.close("left")
        await self.ended

    def first_event(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self.begun.set_result(None)

    def closed(self, error: str | None) -> None:
        self._open -= 1
        if error is None:
            self.complete += 1
        else:
            self.errors[error] += 1
        if self._open == 0:
            self.ended.set_result(None)


class _Stream(asyncio.Protocol):
    def __init__(self, streams: Streams, wire: bytes) -> None:
        self._streams = streams
        self._wire = wire
        self._begun = False
        self._closed = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._wire)

    def data_received(self, data: bytes) -> None:
        found = data.count(b"data: {")
        self._streams.events += found
        if not self._begun:
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                self.close(data.partition(b"\r\n")[0].decode())
                return
            if found:
                self._begun = True
                self._streams.first_event()
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self.close(None if b"data: [DONE]\n\n" in self._tail else "a stream ended without its terminator")
        elif b'data: {"error"' in data:
            self.close(data.decode("utf-8", "replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"the connection was lost: {exc}")

    def close(self, error: str | None) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            self._streams.first_event()
        self._transport.close()
        self._streams.closed(error)


async def _as_program(port: int, count: int, events: int, pace_ms: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    streams = Streams(port, count, events, pace_ms)
    await streams.open()
    await streams.begun
    at_once = count - streams.complete - streams.errors.total()
    await streams.ended
    result = {"complete": streams.complete, "events": streams.events, "at_once": at_once}
    print(json.dumps({**result, "errors": dict(streams.errors)}))


if __name__ == "__main__":
    uvloop.run(_as_program(*map(int, sys.argv[1:5])))
