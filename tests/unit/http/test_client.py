"""The client on real sockets: reuse, limits, resending, cancelling."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from disagg.errors import UpstreamProtocolError, UpstreamTimeoutError, UpstreamUnreachableError
from disagg.http.client import Client
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.messages import Request
from disagg.http.origin import Origin, Outgoing
from disagg.http.responder import Responder
from disagg.http.server import Server

TIMES = LegTimes(60.0, 60.0, 60.0)
POST = Outgoing("POST", "/x", ((b"a", b"b"),), b"body")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Raw:
    """A server that is nothing but a function of its connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = asyncio.Event()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head + await reader.readexactly(4))
        return head


@asynccontextmanager
async def talking(
    peer: Callable[[Raw, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    limits: ClientLimits | None = None,
) -> AsyncIterator[tuple[Client, Origin, Raw]]:
    raw = Raw()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw.connections += 1
        try:
            await peer(raw, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            raw.left.set()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(limits or ClientLimits(tick_s=0.01))
    try:
        yield client, Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), raw
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def always_ok(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await raw.request(reader)
        writer.write(OK)


def once(data: bytes, *, then_close: bool = True) -> Callable[..., Awaitable[None]]:
    async def peer(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(data)
        await writer.drain()
        if not then_close:
            await reader.readexactly(1)

    return peer


async def test_a_request_is_sent_as_given_and_the_connection_kept() -> None:
    """Host and length are added, nothing else; the second request uses the same connection."""
    async with talking(always_ok) as (client, origin, raw):
        for _ in range(2):
            response = await client.request(origin, POST, TIMES)
            assert (response.status, await response.read()) == (200, b"ok")
        assert raw.connections == 1
        assert raw.requests[0] == (
            b"POST /x HTTP/1.1\r\nhost: %b\r\na: b\r\ncontent-length: 4\r\n\r\nbody" % origin.authority.encode()
        )
        assert (client.open_connections, client.busy_connections) == (1, 0)


async def test_parallel_requests_have_connections_of_their_own() -> None:
    """Nothing is queued behind another answer."""

    async def both(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        while len(raw.requests) < 2:
            await asyncio.sleep(0.005)
        writer.write(OK)
        await reader.readexactly(1)

    async with talking(both) as (client, origin, raw):
        await asyncio.gather(client.request(origin, POST, TIMES), client.request(origin, POST, TIMES))
        assert raw.connections == 2


@pytest.mark.parametrize(
    ("data", "body", "kept"),
    [
        (OK, b"ok", 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2;x\r\nbc\r\n0\r\nT: t\r\n\r\n", b"abc", 1),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end", 0),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old", 0),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"ok", 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK, b"ok", 1),
        (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"ok", 0),
    ],
    ids=["length", "chunked", "until-close", "http-1.0", "close", "204", "empty", "interim", "two-answers"],
)
async def test_every_framing_gives_its_body_and_the_right_fate_of_the_connection(
    data: bytes, body: bytes, kept: int
) -> None:
    """What cannot be reused is closed; what came without being asked for never becomes an answer."""
    closes = kept == 0 and b"evil" not in data
    async with talking(once(data, then_close=closes)) as (client, origin, _):
        response = await client.request(origin, POST, TIMES)
        assert await response.read() == body
        await asyncio.sleep(0.02)
        assert client.open_connections == kept


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", UpstreamUnreachableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", UpstreamUnreachableError),
        (b"HTTP/1.1 200 OK\r\nContent-", UpstreamUnreachableError),
        (b"SSH-2.0-OpenSSH_9\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: y\r\n\r\n", UpstreamProtocolError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000, UpstreamProtocolError),
    ],
)
async def test_what_is_no_answer_is_an_error(data: bytes, error: type[Exception]) -> None:
    """Closed early, not HTTP, or without end."""
    async with talking(once(data)) as (client, origin, _):
        with pytest.raises(error):
            await client.request(origin, POST, TIMES)
        await asyncio.sleep(0.01)
        assert client.open_connections == 0


async def test_a_body_that_breaks_off_is_an_error_after_its_bytes() -> None:
    """What has arrived is given out, and then the failure: it never looks complete."""
    async with talking(once(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")) as (client, origin, _):
        response = await client.request(origin, POST, TIMES)
        got: list[bytes] = []
        with pytest.raises(UpstreamUnreachableError, match="middle"):
            await response.relay(got.append)
        assert got == [b"abc"]


async def test_a_closed_idle_connection_is_replaced_and_the_request_sent_again() -> None:
    """The race between our next request and the server's idle close does not reach the caller."""

    async def one_each(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(OK)
        if raw.connections == 1:
            await reader.readexactly(1)  # the second request has arrived: close without an answer
        else:
            await reader.readexactly(10)

    async with talking(one_each) as (client, origin, raw):
        await client.request(origin, POST, TIMES)
        response = await client.request(origin, POST, TIMES)
        assert await response.read() == b"ok"
        assert raw.connections == 2


async def test_what_must_not_be_sent_twice_is_not() -> None:
    """The same race is an error for a request that may already have had its effect."""

    async def one(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(OK)
        await reader.readexactly(1)

    async with talking(one) as (client, origin, raw):
        await client.request(origin, POST, TIMES)
        with pytest.raises(UpstreamUnreachableError):
            await client.request(origin, Outgoing("POST", "/x", (), b"body", resend=False), TIMES)
        assert raw.connections == 1


async def test_a_kept_connection_that_breaks_inside_an_answer_is_not_tried_again() -> None:
    """The server has begun to answer: it was not the idle close."""

    async def half_second(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(OK)
        await raw.request(reader)
        writer.write(OK[:20])
        await writer.drain()

    async with talking(half_second) as (client, origin, raw):
        await client.request(origin, POST, TIMES)
        with pytest.raises(UpstreamUnreachableError):
            await client.request(origin, POST, TIMES)
        assert raw.connections == 1


async def test_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    """Only a kept connection can have been stale: a server that dies of a request must not get it twice."""
    async with talking(once(b"")) as (client, origin, raw):
        with pytest.raises(UpstreamUnreachableError):
            await client.request(origin, POST, TIMES)
        assert raw.connections == 1


async def test_idle_connections_are_closed_before_the_server_does() -> None:
    """After the idle limit there is nothing left to reuse."""
    async with talking(always_ok, ClientLimits(idle_limit_s=0.03, tick_s=0.01)) as (client, origin, raw):
        await client.request(origin, POST, TIMES)
        await asyncio.wait_for(raw.left.wait(), 5)
        assert client.open_connections == 0


@pytest.mark.parametrize(
    ("data", "times", "words"),
    [
        (b"", LegTimes(0.03, 5, 5), "not begun"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", LegTimes(0.03, 5, 5), "not begun"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na", LegTimes(5, 0.03, 5), "silent"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na", LegTimes(5, 5, 0.03), "finished"),
    ],
    ids=["head", "first-byte", "idle", "total"],
)
async def test_each_limit_ends_the_exchange(data: bytes, times: LegTimes, words: str) -> None:
    """The message says which one, and the server sees the connection close."""
    async with talking(once(data, then_close=False)) as (client, origin, raw):
        with pytest.raises(UpstreamTimeoutError, match=words):
            await (await client.request(origin, POST, times)).read()
        await asyncio.wait_for(raw.left.wait(), 5)


async def test_a_steady_stream_outlives_the_idle_limit() -> None:
    """Each byte starts the silence anew."""

    async def drips(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        for _ in range(10):
            writer.write(b"x")
            await asyncio.sleep(0.03)
        await reader.readexactly(1)

    async with talking(drips) as (client, origin, _):
        response = await client.request(origin, POST, LegTimes(5, 0.2, 5))
        assert await response.read() == b"x" * 10


async def test_cancelling_closes_the_connection_at_once() -> None:
    """Before the answer and inside it: the server sees that nobody waits."""
    for data in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"):
        async with talking(once(data, then_close=False)) as (client, origin, raw):

            async def ask(client: Client = client, origin: Origin = origin) -> bytes:
                return await (await client.request(origin, POST, TIMES)).read()

            task = asyncio.create_task(ask())
            await asyncio.sleep(0.03)
            task.cancel()
            await asyncio.wait_for(raw.left.wait(), 5)
            assert client.open_connections == 0


async def test_a_reader_that_pauses_stops_the_server() -> None:
    """Backpressure reaches the sender, and a pause is not the sender's silence."""
    sent = 0

    async def floods(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await raw.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 64000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 64_000)
            sent += 1
            await writer.drain()
        await reader.readexactly(1)

    async with talking(floods) as (client, origin, _):
        response = await client.request(origin, POST, LegTimes(5, 0.1, 30))
        await asyncio.sleep(0.3)
        assert sent < 900
        size = 0

        def count(data: bytes) -> None:
            nonlocal size
            size += len(data)

        await response.relay(count)
        assert size == 64_000_000


async def test_a_closed_port_and_a_strange_host_are_unreachable() -> None:
    """Nothing to connect to is an error of the same kind, with the address in it."""
    async with talking(always_ok) as (client, origin, _):
        pass
    with pytest.raises(UpstreamUnreachableError, match=str(origin.port)):
        await client.request(origin, POST, TIMES)
    with pytest.raises(UpstreamUnreachableError, match=r"nowhere\.invalid"):
        await client.request(Origin.parse("http://nowhere.invalid:1"), POST, TIMES)
    await client.close()


async def test_what_before_send_raises_keeps_the_request_here() -> None:
    """Nothing is sent, and the connection is there for the next one."""

    def refuse() -> None:
        raise LookupError("not now")

    async with talking(always_ok) as (client, origin, raw):
        with pytest.raises(LookupError):
            await client.request(origin, POST, TIMES, refuse)
        assert raw.requests == []
        await client.request(origin, POST, TIMES)
        assert raw.connections == 1


async def test_forgetting_an_origin_ends_what_is_under_way_there() -> None:
    """A process that is gone is not waited for, even if its socket still seems open."""
    async with talking(once(b"", then_close=False)) as (client, origin, _):
        asking = asyncio.create_task(client.request(origin, POST, TIMES))
        await asyncio.sleep(0.03)
        client.forget(origin, UpstreamUnreachableError("gone"))
        with pytest.raises(UpstreamUnreachableError, match="gone"):
            await asking
        assert client.busy_connections == 0


async def test_an_answer_over_the_limit_is_refused() -> None:
    """An engine cannot fill our memory with a body that has to be read whole."""
    async with talking(once(OK, then_close=False)) as (client, origin, _):
        response = await client.request(origin, POST, TIMES)
        with pytest.raises(UpstreamProtocolError, match="over 1 bytes"):
            await response.read(1)


@pytest.mark.parametrize("url", ["ftp://h:1", "h:1", "http://", "unix:/x"])
def test_only_http_origins_are_taken(url: str) -> None:
    """What cannot be spoken is refused where it is configured."""
    with pytest.raises(ValueError, match="http"):
        Origin.parse(url)


def test_an_ipv6_origin_has_brackets_only_on_the_wire() -> None:
    """The socket wants the bare address, the Host header the bracketed one."""
    origin = Origin.parse("http://[::1]:99")
    assert (origin.host, origin.port, origin.authority) == ("::1", 99, "[::1]:99")


async def test_a_body_can_be_iterated_over() -> None:
    """Pieces come as they arrive, and the end is the end."""
    async with talking(
        once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
    ) as t:
        response = await t[0].request(t[1], POST, TIMES)
        assert b"".join([piece async for piece in response]) == b"ab"


async def test_a_burst_leaves_only_so_many_connections_behind() -> None:
    """More idle connections than the limit are closed, not kept."""

    async def together(raw: Raw, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        while len(raw.requests) < 5:
            await asyncio.sleep(0.005)
        writer.write(OK)
        await reader.readexactly(1)

    async with talking(together, ClientLimits(max_idle=2, tick_s=0.01)) as (client, origin, _):
        await asyncio.gather(*(client.request(origin, POST, TIMES) for _ in range(5)))
        await asyncio.sleep(0.02)
        assert client.open_connections == 2


async def test_a_server_that_accepts_nothing_is_given_up_in_time() -> None:
    """Connecting has a limit of its own; a full backlog looks like this."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        held = [socket.socket() for _ in range(4)]
        for s in held:
            s.setblocking(False)
            s.connect_ex(("127.0.0.1", port))
        client = Client(ClientLimits(connect_timeout_s=0.05))
        with pytest.raises(UpstreamUnreachableError, match=r"in 0\.05 s"):
            await client.request(Origin.parse(f"http://127.0.0.1:{port}"), POST, TIMES)
        for s in held:
            s.close()
        await client.close()


async def connect_and_cancel(client: Client, origin: Origin) -> None:
    task = asyncio.ensure_future(client.request(origin, Outgoing("GET", "/"), LegTimes(5, 5, 5)))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_that_is_cancelled_while_it_connects_leaves_no_connection(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Whatever the loop tells of a connection that it closes itself: the pool does not count it for ever."""

    async def run() -> None:
        async def never(request: Request, respond: Responder) -> None:
            await asyncio.sleep(3600)

        server = Server(never)
        await server.start("127.0.0.1", 0)
        client = Client()
        origin = Origin.parse(f"http://127.0.0.1:{server.port}")
        for _ in range(20):
            await connect_and_cancel(client, origin)
        for _ in range(100):
            if client.open_connections:
                await asyncio.sleep(0.01)
        assert client.open_connections == 0
        await client.close()
        await server.stop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
