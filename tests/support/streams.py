"""A stream on its way through the router without sockets: an engine's connection, a client's, and what is between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import httptools

from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.messages import Request
from disagg.http.origin import Origin
from disagg.http.responder import Responder
from disagg.http.upstream import UpstreamConnection
from disagg.router.delivery import Delivery, Stream
from disagg.router.fleet import Fleet
from disagg.router.framing import OPENAI, Framing
from disagg.router.legs import Failure
from disagg.router.metrics import Metrics
from disagg.router.passage import Passage
from disagg.router.record import Path, Record
from disagg.router.relay import EventRelay

ENGINE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event_relay(write: Callable[[bytes], None], framing: Framing = OPENAI) -> EventRelay:
    """A relay whose bytes all go the long way."""
    return EventRelay(write, Passage(framing.error_mark, time.monotonic), framing)


def chunk(data: bytes) -> bytes:
    """One chunk as engines write it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "written to a connection that is closed"
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Client:
    """A client's connection as its responder sees it."""

    closing = False
    writable = True

    def __init__(self, *, http_1_0: bool = False) -> None:
        self.wire = Wire()
        self.transport: asyncio.Transport = self.wire
        self.responder = Responder(self, Request("POST", "/", "/", [], http_1_0=http_1_0))

    def date(self) -> bytes:
        return b""

    def leave(self) -> None:
        """The client closes its connection."""
        self.wire.closed = True
        self.responder.client_left()

    @property
    def body(self) -> bytes:
        """The body that has come so far; AssertionError if it is not framed well."""
        return self.read()[0]

    def read(self) -> tuple[bytes, bool]:
        """The body so far, and whether it is complete."""
        reader = _Reader()
        parser = httptools.HttpResponseParser(reader)
        parser.feed_data(b"".join(self.wire.written))
        return bytes(reader.body), reader.complete


class _Reader:
    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        assert not self.complete, "bytes after the end of the answer"
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class _Pool:
    limits = ClientLimits()

    def closed(self, connection: UpstreamConnection) -> None:
        pass

    def give_back(self, connection: UpstreamConnection) -> None:
        pass


class _Leg:
    """Books that nobody reads."""

    outcome = ""
    member = type("Member", (), {"stage": "decode", "name": "decode-0"})

    def __enter__(self) -> _Leg:
        return self

    def __exit__(self, *_: object) -> None: ...

    def served(self, streaming_since: float | None = None) -> None: ...

    def fail(self, error: Exception) -> Failure:
        return Failure(cast("Any", "decode"), "decode-0", "broken", retry=True, error=cast("Any", error))


class Passing:
    """A stream that is under way: `feed` is what the engine sends, in one read.

    Args:
        times: Limits of the engine's answer.
        http_1_0: The client takes no chunks.
    """

    def __init__(self, times: LegTimes | None = None, *, http_1_0: bool = False) -> None:
        self.clock = 1000.0
        self.engine = UpstreamConnection(_Pool(), Origin.parse("http://127.0.0.1:1"))
        self.engine.connection_made(Wire())
        self.client = Client(http_1_0=http_1_0)
        self.metrics = Metrics(Fleet(()), lambda: self.clock)
        self.record = Record(b"id", "/v1/completions", self.clock, path=Path.DISAGGREGATED)
        self._delivery = Delivery(self.client.responder, self.record, self.metrics, lambda: self.clock, OPENAI)
        self._times = times or LegTimes(60.0, 60.0, 600.0)

    async def begin(self, first: bytes) -> asyncio.Task[Failure | None]:
        """The engine sends the head of its answer and these bytes; the task ends with the stream."""
        asking = asyncio.create_task(self.engine.exchange(b"request", self._times))
        await asyncio.sleep(0)
        self.engine.data_received(ENGINE_HEAD + first)
        response = await asking
        passing = asyncio.create_task(self._delivery.stream(Stream(cast("Any", _Leg()), response)))
        await asyncio.sleep(0)
        return passing

    def feed(self, data: bytes) -> None:
        """The engine sends more, a hundredth of a second later."""
        self.clock += 0.01
        self.engine.data_received(data)
