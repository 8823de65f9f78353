"""The server on a real socket: order, limits, backpressure, departures."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from disagg.errors import BadRequestError, PreparationError
from disagg.http.limits import ServerLimits
from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.http.server import Handler, Server
from tests.support.rig import Call

FAST = ServerLimits(tick_s=0.01)


async def echo(request: Request, respond: Responder) -> None:
    respond.send(200, request.target.encode() + b"|" + request.body)


@asynccontextmanager
async def serving(handler: Handler = echo, limits: ServerLimits = FAST) -> AsyncIterator[tuple[Server, Call]]:
    """A server, and one connection to it."""
    server = Server(handler, limits)
    await server.start("127.0.0.1", 0)
    call = await Call.open(server.port)
    try:
        yield server, call
    finally:
        await call.close()
        await server.stop()


def get(path: str, extra: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: h\r\n{extra}\r\n".encode()


async def test_one_connection_serves_many_requests() -> None:
    """Keep-alive: nothing is closed between requests, and each has its answer."""
    async with serving() as (server, call):
        for n in range(5):
            call.send(get(f"/{n}"))
            assert (await call.reply()).body == f"/{n}|".encode()
        assert len(server.connections) == 1


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    """The second handler starts only after the first answer, however quick it would be."""
    running: list[str] = []

    async def slow_first(request: Request, respond: Responder) -> None:
        running.append(request.path)
        assert len(running) == 1
        await asyncio.sleep(0.05 if request.path == "/0" else 0)
        respond.send(200, request.path.encode())
        running.clear()

    async with serving(slow_first) as (_, call):
        call.send(b"".join(get(f"/{n}") for n in range(4)))
        await asyncio.sleep(0.02)
        call.send(b"".join(get(f"/{n}") for n in range(4, 8)))
        assert [(await call.reply()).body for _ in range(8)] == [f"/{n}".encode() for n in range(8)]


async def test_a_client_that_sends_far_ahead_is_not_read_and_loses_nothing() -> None:
    """More than the buffer allows waits in the kernel until its turn."""
    body = b"x" * 50_000
    post = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    gate = asyncio.Event()

    async def waits(request: Request, respond: Responder) -> None:
        await gate.wait()
        respond.send(200, str(len(request.body)).encode())

    async with serving(waits) as (_, call):
        call.send(post)
        await asyncio.sleep(0.02)
        call.send(post * 20)
        await asyncio.sleep(0.05)
        gate.set()
        assert [(await call.reply()).body for _ in range(21)] == [b"50000"] * 21


async def test_a_client_that_expects_100_gets_it_before_it_sends() -> None:
    """The body follows the interim answer, then comes the real one."""
    async with serving() as (_, call):
        call.send(b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await call.head()).status == 100
        call.send(b"ok")
        assert (await call.reply()).body == b"/e|ok"


async def test_100_waits_for_the_answers_before_it() -> None:
    """An interim answer must not overtake the answer of an earlier request."""

    async def slow(request: Request, respond: Responder) -> None:
        await asyncio.sleep(0.03)
        await echo(request, respond)

    async with serving(slow) as (_, call):
        call.send(get("/a") + b"POST /e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await call.reply()).body == b"/a|"
        assert (await call.head()).status == 100
        call.send(b"ok")
        assert (await call.reply()).body == b"/e|ok"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, 413),
        (get("/", "A: " + "b" * 3000 + "\r\n"), 431),
    ],
)
async def test_a_refused_request_is_answered_and_the_connection_closed(data: bytes, status: int) -> None:
    """The client reads why, in the usual JSON shape, and what follows is not served."""
    async with serving(limits=ServerLimits(max_body_bytes=100, max_header_bytes=1000)) as (_, call):
        call.send(data + get("/smuggled"))
        reply = await call.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (status, status)
        assert reply.headers["connection"] == "close"
        assert await call.reader.read() == b""


async def test_a_large_refused_body_does_not_cost_the_client_its_answer() -> None:
    """The rest of the body is dropped for a while, instead of a reset that would eat the 413."""
    async with serving(limits=ServerLimits(max_body_bytes=100)) as (_, call):
        call.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000)
        assert (await call.reply()).status == 413


@pytest.mark.parametrize(
    ("part", "limits", "status"),
    [
        (b"GET / HT", ServerLimits(head_timeout_s=0.03, tick_s=0.01), 408),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nabc",
            ServerLimits(body_timeout_s=0.03, tick_s=0.01),
            408,
        ),
    ],
)
async def test_a_slow_request_is_refused(part: bytes, limits: ServerLimits, status: int) -> None:
    """A client that drips bytes is told so, and does not hold the connection."""
    async with serving(limits=limits) as (_, call):
        call.send(part)
        assert (await call.reply()).status == status
        assert await call.reader.read() == b""


async def test_dripping_header_bytes_do_not_extend_the_limit() -> None:
    """The time for the head is counted from its first byte."""
    async with serving(limits=ServerLimits(head_timeout_s=0.1, tick_s=0.01)) as (_, call):
        for byte in b"GET / HTTP/1.1\r\nHost: hhhhhhhhhhhhhhhhhhhh":
            call.send(bytes([byte]))
            await asyncio.sleep(0.01)
        assert (await call.reply()).status == 408


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    """Between requests there is nothing to answer."""
    async with serving(limits=ServerLimits(idle_timeout_s=0.03, tick_s=0.01)) as (_, call):
        assert await call.reader.read() == b""


async def test_a_handler_is_told_and_cancelled_when_its_client_leaves() -> None:
    """First the callback, then the cancellation."""
    story: list[str] = []
    over = asyncio.Event()

    async def waits(request: Request, respond: Responder) -> None:
        respond.on_disconnect(lambda: story.append("told"))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            story.append("cancelled")
            over.set()
            raise

    async with serving(waits) as (server, call):
        call.send(get("/"))
        await asyncio.sleep(0.02)
        assert server.active == 1
        await call.close()
        await asyncio.wait_for(over.wait(), 5)
        assert story == ["told", "cancelled"]
        assert server.active == 0


async def test_no_disconnect_is_told_after_a_complete_answer() -> None:
    """A client that leaves afterwards has not left the request."""
    told: list[int] = []

    async def answers(request: Request, respond: Responder) -> None:
        respond.on_disconnect(lambda: told.append(1))
        respond.send(200, b"x")

    async with serving(answers) as (_, call):
        call.send(get("/"))
        await call.reply()
        await call.close()
        await asyncio.sleep(0.02)
        assert told == []


async def test_a_slow_reader_stops_the_writer() -> None:
    """`drain` waits while the client does not read, so that memory stays bounded; flow callbacks say the same."""
    sent = 0
    flow: list[bool] = []

    async def floods(request: Request, respond: Responder) -> None:
        nonlocal sent
        respond.on_flow(flow.append)
        respond.start(200)
        for _ in range(1000):
            respond.write(b"x" * 65_536)
            sent += 1
            await respond.drain()
        respond.finish()

    async with serving(floods) as (_, call):
        call.send(get("/"))
        await asyncio.sleep(0.2)
        before = sent
        assert before < 900
        assert flow[-1] is False
        assert len((await call.reply()).body) == 1000 * 65_536
        assert True in flow


async def test_a_reader_that_has_stopped_for_too_long_counts_as_gone() -> None:
    """A stalled client does not hold its request for ever."""
    over = asyncio.Event()

    async def floods(request: Request, respond: Responder) -> None:
        respond.start(200)
        try:
            while True:
                respond.write(b"x" * 65_536)
                await respond.drain()
                await asyncio.sleep(0)
        finally:
            over.set()

    async with serving(floods, ServerLimits(write_stall_s=0.1, tick_s=0.01)) as (_, call):
        call.send(get("/"))
        await asyncio.wait_for(over.wait(), 10)


async def test_an_error_of_ours_is_its_answer() -> None:
    """Status, kind and message reach the client; the connection goes on."""

    async def fails(request: Request, respond: Responder) -> None:
        raise BadRequestError("no", hint="Do better.", param="p")

    async with serving(fails) as (_, call):
        for _ in range(2):
            call.send(get("/"))
            reply = await call.reply()
            assert reply.status == 400
            assert reply.json() == {
                "error": {"message": "no Do better.", "type": "BadRequestError", "param": "p", "code": 400}
            }


async def test_a_bug_in_a_handler_is_a_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback is in the log, not in the answer, and the server lives on."""

    async def bug(request: Request, respond: Responder) -> None:
        raise KeyError("secret")

    with caplog.at_level(logging.ERROR, "disagg.http"):
        async with serving(bug) as (_, call):
            call.send(get("/"))
            reply = await call.reply()
            assert reply.status == 500
            assert b"secret" not in reply.body
    assert "secret" in caplog.text


async def test_an_answer_that_was_not_finished_is_visibly_broken() -> None:
    """A handler that returns in mid-answer leaves no complete body behind."""

    async def half(request: Request, respond: Responder) -> None:
        respond.start(200, first=b"abc")
        await asyncio.sleep(0.01)

    async with serving(half) as (_, call):
        call.send(get("/"))
        reply = await call.reply()
        assert (reply.body, reply.complete) == (b"abc", False)


async def test_http_1_0_gets_no_chunks_and_head_gets_no_body() -> None:
    """The old version ends a body by closing; HEAD has the headers of GET."""

    async def streams(request: Request, respond: Responder) -> None:
        if request.path == "/s":
            respond.start(200, first=b"ab")
            respond.write(b"c")
            respond.finish(b"d")
        else:
            respond.send(200, b"body")

    async with serving(streams) as (server, call):
        call.send(b"GET /s HTTP/1.0\r\n\r\n")
        reply = await call.head()
        assert reply.headers["connection"] == "close"
        assert "transfer-encoding" not in reply.headers
        assert await call.reader.read() == b"abcd"
        second = await Call.open(server.port)
        second.send(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n" + get("/"))
        assert (await second.head()).headers["content-length"] == "4"
        assert (await second.reply()).body == b"body"
        await second.close()


async def test_drain_lets_requests_end_and_takes_no_new_ones() -> None:
    """Idle connections close at once, a running request ends in peace, a new connection is refused."""
    gate = asyncio.Event()

    async def waits(request: Request, respond: Responder) -> None:
        await gate.wait()
        respond.send(200, b"done")

    async with serving(waits) as (server, call):
        idle = await Call.open(server.port)
        port = server.port
        call.send(get("/"))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(server.drain(5))
        assert await idle.reader.read() == b""
        with pytest.raises(OSError, match=r"."):
            await Call.open(port)
        assert not drained.done()
        gate.set()
        reply = await call.reply()
        assert (reply.body, reply.headers["connection"]) == (b"done", "close")
        assert await drained is True
        await idle.close()


async def test_drain_reports_what_did_not_end() -> None:
    """The caller learns that it has to stop something that runs."""

    async def hangs(request: Request, respond: Responder) -> None:
        await asyncio.sleep(60)

    async with serving(hangs) as (server, call):
        call.send(get("/"))
        await asyncio.sleep(0.02)
        assert await server.drain(0.02) is False


async def test_a_taken_port_is_named() -> None:
    """The message says which address, and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreparationError, match=f"port {port}"):
            await Server(echo).start("127.0.0.1", port)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "a\0b"])
async def test_a_host_that_is_none_is_a_clear_error(host: str) -> None:
    """Whatever the resolver makes of it."""
    with pytest.raises(PreparationError, match="Cannot listen on"):
        await Server(echo).start(host, 0)


async def test_ipv6_is_served() -> None:
    """An address with colons binds and answers."""
    server = Server(echo)
    try:
        await server.start("::1", 0)
    except PreparationError:
        pytest.skip("this machine has no IPv6 loopback")
    reader, writer = await asyncio.open_connection("::1", server.port)
    call = Call(reader, writer)
    call.send(get("/six"))
    assert (await call.reply()).body == b"/six|"
    await call.close()
    await server.stop()


async def test_an_error_after_the_answer_has_begun_breaks_it_off(caplog: pytest.LogCaptureFixture) -> None:
    """There is no second status line inside a body; the log has the reason."""

    async def late(request: Request, respond: Responder) -> None:
        respond.start(200, first=b"abc")
        await asyncio.sleep(0.01)
        raise BadRequestError("too late")

    async with serving(late) as (_, call):
        call.send(get("/"))
        reply = await call.reply()
        assert (reply.body, reply.complete) == (b"abc", False)
    assert "too late" in caplog.text


async def test_an_answer_is_started_once() -> None:
    """A second start is a bug of the handler, and shows as one."""
    seen: list[str] = []

    async def twice(request: Request, respond: Responder) -> None:
        respond.send(200, b"x")
        try:
            respond.send(200, b"y")
        except RuntimeError as error:
            seen.append(str(error))

    async with serving(twice) as (_, call):
        call.send(get("/") + get("/"))
        assert [(await call.reply()).body for _ in range(2)] == [b"x", b"x"]
        assert len(seen) == 2


async def test_a_refused_client_that_never_stops_sending_is_cut_off() -> None:
    """The rest of a refused request is dropped for a moment only."""
    async with serving(limits=ServerLimits(max_body_bytes=10, tick_s=0.01)) as (server, call):
        call.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n")
        assert (await call.reply()).status == 413
        for _ in range(300):
            if not server.connections:
                break
            await asyncio.sleep(0.01)
        assert not server.connections
