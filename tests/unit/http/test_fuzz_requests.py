"""Hostile requests: what the handler sees does not depend on packets, and what is ambiguous is seen by nobody."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.http.limits import ServerLimits
from disagg.http.messages import Request
from disagg.http.reader import RequestReader
from disagg.http.responder import Responder
from disagg.http.server import Server
from tests.unit.http.vectors import AMBIGUOUS, HIDDEN, PLAIN

ALL = {**AMBIGUOUS, **PLAIN}
TOKENS = (
    b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b";", b",", b"0", b"1", b"f", b"-", b"+", b"\0", b"\xff", b"\x0b",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: evil\r\n", b"0\r\n\r\n", b"chunked",
)  # fmt: skip


def seen(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], bool]:
    """What a reader makes of these packets: the requests, and whether it refused to go on."""
    reader = RequestReader(ServerLimits())
    for piece in pieces:
        reader.feed(piece)
    requests = [(r.method, r.target, r.headers, r.body, r.keep_alive) for r in reader.requests]
    return requests, reader.refusal is not None


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A vector with a few bytes taken out, put in or doubled."""
    data = draw(st.sampled_from(list(ALL.values())))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        token = draw(st.sampled_from(TOKENS))
        kind = draw(st.integers(0, 2))
        data = data[:at] + (token if kind == 0 else b"") + data[at + (kind == 1) :]
        if kind == 2:
            data = data[:at] + data[at : at + 9] + data[at:]
    return data


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_request_is_refused_and_hides_none(name: str) -> None:
    """Byte by byte, at once, and cut anywhere: nothing is served, and nothing after it is either."""
    data = AMBIGUOUS[name]
    for pieces in ([data], [bytes((b,)) for b in data], *([data[:n], data[n:]] for n in range(1, len(data)))):
        requests, refused = seen(pieces)
        assert refused or not requests, (name, len(pieces[0]))
        assert [r[1] for r in requests if "hidden" in r[1]] == []
        if name != "cl-minus":
            assert requests == []


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_request_is_seen_the_same_however_it_is_cut(name: str) -> None:
    """Every cut into two packets, and one byte at a time."""
    data = PLAIN[name]
    whole = seen([data])
    assert whole[0] != []
    assert not whole[1]
    assert all(request[1] == "/seen" for request in whole[0])
    assert seen([bytes((b,)) for b in data]) == whole
    for n in range(1, len(data)):
        assert seen([data[:n], data[n:]]) == whole


@given(data=mutated(), cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=400)
def test_mutations_are_read_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    """No exception, and the same requests whatever the packets."""
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert seen(pieces) == seen([data])
    assert seen([bytes((b,)) for b in data]) == seen([data])


@given(data=mutated())
@settings(max_examples=200)
def test_a_request_that_is_served_has_one_clear_length(data: bytes) -> None:
    """What a handler may forward never says two things about its body, nor has bytes that end a header line."""
    for _, target, headers, _, _ in seen([data])[0]:
        names = [name for name, _ in headers]
        assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
        assert names.count(b"host") <= 1
        for name, value in headers:
            assert not set(name + value) & set(b"\r\n\0")
        assert not set(target) & set("\r\n\0 ")


async def test_a_server_survives_all_of_them() -> None:
    """Each vector on a connection of its own: an error or silence, and afterwards the server answers as before."""
    served: list[str] = []

    async def handler(request: Request, respond: Responder) -> None:
        served.append(request.path)
        respond.send(200, b"ok")

    server = Server(handler, ServerLimits(head_timeout_s=0.3, body_timeout_s=0.3, tick_s=0.05))
    await server.start("127.0.0.1", 0)

    async def attack(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer

    answers = await asyncio.gather(*(attack(data) for data in AMBIGUOUS.values()))
    for name, answer in zip(AMBIGUOUS, answers, strict=True):
        assert answer.startswith((b"HTTP/1.1 4", b"")), name
        assert answer.count(b"\r\ndate: ") <= 1, name
    assert "/hidden" not in served
    last = await attack(HIDDEN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert last.startswith(b"HTTP/1.1 200")
    await server.stop()
