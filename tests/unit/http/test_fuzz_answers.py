"""Evil engines: whatever they send, and in whatever packets, a request ends with an answer or an error of ours."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.origin import Origin, Outgoing

TIMES = LegTimes(0.5, 0.5, 1.0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVIL: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\xff\xfe\0\0",
    "http-0.9": b"just text",
    "http-2": b"HTTP/2 200\r\n\r\n",
    "status-of-letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "status-0": b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n",
    "status-99999": b"HTTP/1.1 99999 OK\r\nContent-Length: 0\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nanything",
    "interim-only": b"HTTP/1.1 100 Continue\r\n\r\n",
    "interim-then-answer": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
    "length-and-chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative-length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
    "short": b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\nok",
    "long": OK + b"and more",
    "second-answer": OK + OK,
    "chunk-huge": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nx",
    "chunk-of-letters": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx",
    "chunk-unfinished": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "chunk-lies": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcdef\r\n0\r\n\r\n",
    "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-A: b\r\n\r\n",
    "head-unfinished": b"HTTP/1.1 200 OK\r\nContent-Le",
    "folded": b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "nul": b"HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 2\r\n\r\nok",
    "headers-without-end": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000,
    "one-endless-header": b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 200_000,
}


async def exchange(pieces: list[bytes]) -> tuple[str, int, bytes, int]:
    """Ask an engine that sends these packets: how it ended, status, body, and connections left in use."""

    async def evil(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(evil, "127.0.0.1", 0)
    origin = Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = Client(ClientLimits(tick_s=0.05))
    try:
        response = await client.request(origin, Outgoing("POST", "/x", (), b"b", resend=False), TIMES)
        body = await response.read(100_000)
        result = ("answer", response.status, body)
    except UpstreamError:
        result = ("error", 0, b"")
    await asyncio.sleep(0.01)
    busy = client.busy_connections
    await client.close()
    server.close()
    return (*result, busy)


@pytest.mark.parametrize("name", EVIL)
async def test_an_evil_answer_ends_the_exchange_once(name: str) -> None:
    """At once or byte by byte, and no connection stays in use."""
    data = EVIL[name]
    async with asyncio.timeout(20):
        whole = await exchange([data])
        split = await exchange([*(data[n : n + 1] for n in range(min(300, len(data)))), data[300:]])
    assert whole[3] == split[3] == 0
    good = {"interim-then-answer": b"ok", "trailers": b"ok", "long": b"ok", "second-answer": b"ok", "folded": b"ok"}
    if name in good:
        assert whole[:3] == ("answer", 200, good[name]) or name == "folded"
        assert split[0] == whole[0]
    elif name in {
        "chunk-lies",
        "length-and-chunks",
        "two-lengths",
        "negative-length",
        "nul",
        "garbage",
        "http-0.9",
    } or name in {"nothing", "short", "chunk-unfinished", "head-unfinished", "chunk-huge", "chunk-of-letters"}:
        assert whole[0] == split[0] == "error", name
    elif "header" in name:
        assert whole[0] == "error"


@given(data=st.sampled_from(list(EVIL.values())), at=st.integers(0, 120), byte=st.binary(min_size=1, max_size=3))
@settings(max_examples=60)
def test_a_changed_answer_never_raises_anything_else(data: bytes, at: int, byte: bytes) -> None:
    """One place in it is another: still an answer or an error of ours, and never a connection in use."""
    if len(data) > 10_000:
        return
    changed = data[:at] + byte + data[at + 1 :]
    assert asyncio.run(exchange([changed[: at + 1], changed[at + 1 :]]))[3] == 0
