"""Whole chunks pass unparsed, and nothing else does."""

from __future__ import annotations

import asyncio

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import UpstreamProtocolError
from disagg.http.chunks import LONGEST, SINGLE, payload_size
from disagg.http.client import Client
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.origin import Origin, Outgoing

TIMES = LegTimes(5.0, 5.0, 5.0)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Body:
    """Collects what a parser finds."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


@given(st.lists(st.binary(min_size=1, max_size=4095), min_size=1, max_size=5))
def test_whole_chunks_are_known(pieces: list[bytes]) -> None:
    """Any run of complete chunks of usual size is taken for one, whatever is in them."""
    assert payload_size(b"".join(map(_chunk, pieces))) == sum(map(len, pieces))


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4))
def test_chunks_have_to_end_as_asked(pieces: list[bytes]) -> None:
    """With an ending, each chunk must have it: one that ends in the middle of an event counts for nothing."""
    wire = b"".join(map(_chunk, pieces))
    expected = sum(map(len, pieces)) if all(p.endswith(b"\n") for p in pieces) else 0
    assert payload_size(wire, b"\n") == expected
    ended = [p + b"\n" for p in pieces]
    assert payload_size(b"".join(map(_chunk, ended)), b"\n") == sum(map(len, ended))


def test_a_chunk_is_known_by_its_length() -> None:
    """For each size in the table, the framed length gives its beginning and size; no other length has a beginning."""
    sizes = set()
    for length, (head, size) in enumerate(SINGLE):
        if size:
            assert len(_chunk(b"x" * size)) == length
            assert _chunk(b"x" * size).startswith(head)
            sizes.add(size)
        else:
            assert not b"0\r\n\r\n".startswith(head)
    assert sizes == set(range(1, max(sizes) + 1))
    assert len(_chunk(b"x" * max(sizes))) == LONGEST


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3), st.data())
def test_a_part_of_a_chunk_is_no_whole_chunk(pieces: list[bytes], data: st.DataObject) -> None:
    """Cut anywhere inside a chunk, the bytes are left to the parser."""
    wire = b"".join(map(_chunk, pieces))
    ends = {sum(len(_chunk(p)) for p in pieces[:n]) for n in range(len(pieces) + 1)}
    cut = data.draw(st.integers(1, len(wire) - 1).filter(lambda n: n not in ends) if len(wire) > 1 else st.nothing())
    assert payload_size(wire[:cut]) == 0


@pytest.mark.parametrize(
    "wire",
    [
        b"0\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"05\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5;x=y\r\nhello\r\n",
        b"5\nhello\n",
        b"5\r\nhello!\r\n",
        b"5\r\nhell\r\n",
        b"-1\r\n\r\n",
        b"\r\n",
        b"",
    ],
)
def test_unusual_framing_is_left_to_the_parser(wire: bytes) -> None:
    """The end of a body, extensions, signs and lying sizes are never passed on as they are."""
    assert payload_size(wire) == 0


@given(st.binary(max_size=200))
def test_what_passes_is_what_a_parser_reads(wire: bytes) -> None:
    """Bytes that count as whole chunks are valid for the HTTP parser, with the body going on after them."""
    for candidate in (wire, _chunk(wire) if wire else b"1\r\nx\r\n", _chunk(b"a") + wire):
        size = payload_size(candidate)
        if size:
            found = _Body()
            parser = httptools.HttpResponseParser(found)
            parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + candidate)
            assert not found.complete
            assert len(found.body) == size
            parser.feed_data(b"0\r\n\r\n")
            assert found.complete


class _Engine:
    """Answers one request with pieces that a test sends one at a time."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.writer = writer
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + _chunk(b"first"))
        self.asked.set()


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6), st.data())
def test_parsed_and_passed_chunks_make_up_the_body(pieces: list[bytes], data: st.DataObject) -> None:
    """However reads cut a stream, each byte of its body is parsed or passes in a whole chunk, once, in order."""
    wire = b"".join(map(_chunk, pieces)) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=6)))
    reads = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    agrees = data.draw(st.booleans())
    assert asyncio.run(_relay(reads, agrees)) == b"first" + b"".join(pieces)


class _Taker:
    """Takes whole chunks, if it agrees to."""

    def __init__(self, body: bytearray, agrees: bool) -> None:
        self.size = 0
        self._body = body
        self._agrees = agrees

    def take(self, data: bytes) -> bool:
        size = payload_size(data) if self._agrees else 0
        if size:
            self.size += size
            found = _Body()
            parser = httptools.HttpResponseParser(found)
            parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data)
            self._body.extend(found.body)
        return size > 0

    def silent_s(self) -> float:
        return 0.0


async def _relay(reads: list[bytes], agrees: bool) -> bytes:
    engine = _Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    client = Client(ClientLimits())
    body = bytearray()

    origin = Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        response = await client.request(origin, Outgoing("GET", "/"), TIMES)
        relaying = asyncio.create_task(response.relay(body.extend, _Taker(body, agrees)))
        await asyncio.sleep(0)
        (connection,) = client._open  # the reads of one connection, without the kernel between them
        for read in reads:
            connection.data_received(read)
        await relaying
    finally:
        await client.close()
        engine.writer.close()
        server.close()
    return bytes(body)


async def test_garbage_after_passed_chunks_is_still_an_error() -> None:
    """The parser goes on where the passed chunks ended, so broken framing after them ends the exchange."""
    with pytest.raises(UpstreamProtocolError):
        await _relay([_chunk(b"one"), _chunk(b"two"), b"zz\r\n"], agrees=True)
