"""The request parser: equal results however the bytes are cut, and no way to smuggle."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import HeadersTooLargeError, PayloadTooLargeError
from disagg.http.limits import ServerLimits
from disagg.http.reader import Phase, RequestReader

GET = b"GET /a?b=c HTTP/1.1\r\nHost: h\r\nX-Odd:  v v \r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nhost: h\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
)
UPGRADE = (
    b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    b"Content-Length: 4\r\n\r\nbody"
)


def read(data: bytes, limits: ServerLimits | None = None) -> RequestReader:
    reader = RequestReader(limits or ServerLimits())
    reader.feed(data)
    return reader


def test_a_request_is_read_as_it_was_sent() -> None:
    """Method, target, path, header names in lower case, body; a value is found without the blanks around it."""
    first, second, third = read(GET + POST + CHUNKED).requests
    assert (first.method, first.target, first.path) == ("GET", "/a?b=c", "/a")
    assert first.headers == [(b"host", b"h"), (b"x-odd", b"v v ")]
    assert first.header(b"x-odd") == b"v v"
    assert (second.path, second.body) == ("/p", b"hello")
    assert (third.path, third.body) == ("/c", b"abc0123456789")
    assert third.header(b"trailer") is None


@given(cuts=st.lists(st.integers(0, 600), max_size=30))
def test_the_result_does_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    """Four pipelined requests in arbitrary pieces are the same four requests."""
    data = GET + POST + UPGRADE + CHUNKED + GET
    reader = RequestReader(ServerLimits())
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
    assert reader.refusal is None
    assert [(r.method, r.path, r.body) for r in reader.requests] == [
        ("GET", "/a", b""),
        ("POST", "/p", b"hello"),
        ("POST", "/u", b"body"),
        ("POST", "/c", b"abc0123456789"),
        ("GET", "/a", b""),
    ]


@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
def test_arbitrary_bytes_never_raise(data: bytes, cut: int) -> None:
    """Whatever arrives is parsed, waited for, or refused with a reason."""
    reader = RequestReader(ServerLimits())
    reader.feed(data[:cut])
    reader.feed(data[cut:])
    assert reader.refusal is None or reader.refusal.status in {400, 413, 431}


@given(at=st.integers(0, 120), byte=st.integers(0, 255))
def test_one_changed_byte_never_raises_and_never_adds_requests(at: int, byte: int) -> None:
    """A damaged request does not turn into several."""
    data = bytearray(CHUNKED)
    data[at % len(data)] = byte
    reader = read(bytes(data))
    assert len(reader.requests) <= 1


HEAD = b"POST /p HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: h\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
        HEAD + b"Content-Length: +5\r\n\r\nhello",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 0x5\r\n\r\nhello",
        HEAD + b"Content-Length: 5_0\r\n\r\nhello",
        HEAD + b"Content-Length: 99999999999999999999\r\n\r\nhello",
        HEAD + b"Content-Length : 5\r\n\r\nhello",
        HEAD + b"Content-Length:\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding\r\n : chunked\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"POST /p HTTP/1.1\nHost: h\nContent-Length: 5\n\nhello",
        b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n X: folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n folded: b\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: h\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
        HEAD + b"Expect: 200-ok\r\nContent-Length: 5\r\n\r\nhello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_two_servers_could_read_differently_is_refused(data: bytes) -> None:
    """No request comes out of it, nothing after it is read, and the client is told 400 (or 413 for absurd sizes)."""
    reader = read(data)
    reader.feed(GET)
    assert list(reader.requests) == []
    assert reader.refusal is not None
    assert reader.refusal.status in {400, 413}


def test_what_precedes_a_refused_request_is_still_served() -> None:
    """A bad request does not undo the one before it."""
    reader = read(GET + HEAD + b"Content-Length: x\r\n\r\n")
    assert [r.path for r in reader.requests] == ["/a"]
    assert reader.refusal is not None


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    """The declared length is enough; a chunked body is refused as soon as it passes the limit."""
    limits = ServerLimits(max_body_bytes=10)
    assert isinstance(read(HEAD + b"Content-Length: 11\r\n\r\n", limits).refusal, PayloadTooLargeError)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n8\r\n01234567\r\n"
    assert read(chunked, limits).refusal is None
    assert isinstance(read(chunked + b"3\r\nabc\r\n", limits).refusal, PayloadTooLargeError)
    assert [r.body for r in read(HEAD + b"Content-Length: 10\r\n\r\n0123456789", limits).requests] == [b"0123456789"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 3000,
        b"GET /" + b"a" * 3000,
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 40 + b"\r\n",
    ],
)
def test_headers_over_the_limits_are_refused(head: bytes) -> None:
    """In bytes or in lines, complete or not."""
    reader = read(head, ServerLimits(max_header_bytes=2000, max_headers=20))
    assert isinstance(reader.refusal, HeadersTooLargeError)
    assert list(reader.requests) == []


def test_a_chunked_body_of_framing_is_refused() -> None:
    """Chunk extensions and trailers cannot be used to send without end under the body limit."""
    reader = RequestReader(ServerLimits())
    reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(64):
        reader.feed(b"1;" + b"e" * 32_000 + b"\r\nx\r\n")
    assert reader.refusal is not None


@pytest.mark.parametrize(
    ("lines", "wants"),
    [
        (b"Expect: 100-continue\r\nContent-Length: 3\r\n", True),
        (b"Expect: 100-Continue\r\nTransfer-Encoding: chunked\r\n", True),
        (b"Expect: 100-continue\r\nContent-Length: 0\r\n", False),
        (b"Content-Length: 3\r\n", False),
    ],
)
def test_a_client_that_waits_for_100_is_noticed(lines: bytes, wants: bool) -> None:
    """Only a request with a body to come waits."""
    assert read(HEAD + lines + b"\r\n").wants_continue is wants


def test_a_refused_request_gets_no_100() -> None:
    """Otherwise the client would send a body that is too large."""
    reader = read(HEAD + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n", ServerLimits(max_body_bytes=10))
    assert reader.refusal is not None
    assert not reader.wants_continue


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_keep_alive_follows_version_and_connection_header(head: bytes, keep: bool) -> None:
    """HTTP/1.1 keeps unless told not to, HTTP/1.0 the other way round."""
    assert read(head).requests[0].keep_alive is keep


def test_an_absolute_target_is_taken_by_its_path() -> None:
    """A client that thinks it talks to a proxy is served as any other."""
    assert read(b"GET http://h/x?y HTTP/1.1\r\nHost: h\r\n\r\n").requests[0].path == "/x"


def test_phases_tell_which_time_limit_applies() -> None:
    """Idle, in the head, in the body, idle again."""
    reader = RequestReader(ServerLimits())
    phases = [reader.phase]
    for part in (POST[:10], POST[10:-5], POST[-5:]):
        reader.feed(part)
        phases.append(reader.phase)
    assert phases == [Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.IDLE]
