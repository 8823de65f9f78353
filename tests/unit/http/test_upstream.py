"""One connection to an engine, turn by turn of the loop: whose exchange it is when things happen at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.origin import Origin
from disagg.http.response import Response
from disagg.http.upstream import UpstreamConnection

TIMES = LegTimes(60.0, 60.0, 60.0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
lingers = pytest.mark.parametrize("linger", [None, lambda: 5.0], ids=["closes", "lingers"])


class Wire(asyncio.Transport):
    """A transport that only remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Kept:
    """A pool that remembers what it is given back."""

    limits = ClientLimits()

    def __init__(self) -> None:
        self.idle: list[UpstreamConnection] = []

    def closed(self, connection: UpstreamConnection) -> None:
        pass

    def give_back(self, connection: UpstreamConnection) -> None:
        self.idle.append(connection)


async def cancelled_while(
    data: bytes, linger: Callable[[], float] | None
) -> tuple[UpstreamConnection, Kept, Wire, asyncio.Task[object]]:
    """An exchange that is cancelled, and whose answer comes before its task gets to know."""
    pool, wire = Kept(), Wire()
    connection = UpstreamConnection(pool, Origin.parse("http://127.0.0.1:1"))
    connection.connection_made(wire)
    first: asyncio.Task[object] = asyncio.create_task(connection.exchange(b"first", TIMES, linger))
    await asyncio.sleep(0)
    first.cancel()
    connection.data_received(data)
    return connection, pool, wire, first


@lingers
async def test_an_answer_between_cancelling_and_its_notice_leaves_the_next_exchange_alone(
    linger: Callable[[], float] | None,
) -> None:
    """The connection is the pool's again, and somebody else may have it: that one is answered, and has its limits."""
    connection, pool, wire, first = await cancelled_while(OK, linger)
    assert pool.idle == [connection]
    # Taken by another request before the first one's task has had its turn.
    second = connection.exchange(b"second", TIMES)
    waiting = second.send(None)
    deadline = connection.deadline
    with pytest.raises(asyncio.CancelledError):
        await first
    assert connection.busy
    assert connection.deadline == deadline
    assert not wire.closed
    connection.data_received(OK)
    assert waiting is not None
    with pytest.raises(StopIteration) as ended:
        second.send(None)
    assert await ended.value.value.read() == b"ok"


@lingers
async def test_the_beginning_of_an_answer_between_cancelling_and_its_notice_closes_the_connection(
    linger: Callable[[], float] | None,
) -> None:
    """Nobody will read the rest."""
    connection, pool, wire, first = await cancelled_while(OK[:-1], linger)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert wire.closed
    assert not connection.busy
    assert pool.idle == []


async def test_an_answer_between_cancelling_and_its_notice_goes_to_who_takes_late_ones() -> None:
    """Complete or only begun: whoever the caller named can still read all of it."""
    for data, rest in ((OK, b""), (OK[:-1], OK[-1:])):
        pool, wire = Kept(), Wire()
        connection = UpstreamConnection(pool, Origin.parse("http://127.0.0.1:1"))
        connection.connection_made(wire)
        taken: list[Response] = []
        first = asyncio.create_task(connection.exchange(b"first", TIMES, lambda: 1.0, taken.append))
        await asyncio.sleep(0)
        first.cancel()
        connection.data_received(data)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len(taken) == 1
        if rest:
            connection.data_received(rest)
        assert await taken[0].read() == b"ok"
        assert not wire.closed
