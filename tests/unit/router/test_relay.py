"""What reaches the client of an engine's answer."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import UpstreamTimeoutError
from disagg.router.framing import OPENAI
from disagg.router.relay import error_status, hide_internal, relayed_headers
from tests.support.streams import event_relay

EVENTS = [b'data: {"n":%d}\n\n' % n for n in range(6)] + [
    b"data: a\ndata: b\r\n\r\n",
    b": comment\n\n",
    b"data: [DONE]\n\n",
]


@given(cuts=st.lists(st.integers(0, 140), max_size=20))
def test_only_whole_events_pass_and_all_bytes_do(cuts: list[int]) -> None:
    """However the stream is cut: the same bytes, and at every moment whole events."""
    data = b"".join(EVENTS)
    ends = {sum(map(len, EVENTS[: i + 1])) for i in range(len(EVENTS))}
    passed: list[bytes] = []
    relay = event_relay(passed.append)
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    for start, end in pairwise(edges):
        relay(data[start:end])
        assert not passed or sum(map(len, passed)) in ends
    assert b"".join(passed) == data
    assert relay.rest() == b""
    assert relay.ended


def test_an_event_without_end_is_not_held_for_ever() -> None:
    """Beyond the cap the bytes pass as they are, rather than fill the memory."""
    passed: list[bytes] = []
    relay = event_relay(passed.append)
    for _ in range(9):
        relay(b"x" * 1024**2)
    assert sum(map(len, passed)) >= 8 * 1024**2


def test_the_first_event_decides_about_rejection_only_if_it_is_a_5xx() -> None:
    """A later error, or one that is the client's, is part of the stream."""
    failed = b'data: {"error":{"message":"m","code":500}}\n\n'
    refused = b'data: {"error":{"message":"m","code":400}}\n\n'
    for sent, rejected in (((failed,), True), ((refused,), False), ((EVENTS[0], failed), False)):
        passed: list[bytes] = []
        relay = event_relay(passed.append)
        for event in sent:
            relay(event)
        assert bool(relay.rejected) is rejected
        assert relay.saw_error
        assert b"".join(passed) == (b"" if rejected else b"".join(sent))


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error":{"code":503}}\n\n', 503),
        (b'data: {"error"\n\n', 500),
        (b'data: {"error":{}}\n\n', 500),
        (b"data: x\n\n", 0),
    ],
)
def test_the_status_of_an_error_event(event: bytes, status: int) -> None:
    """What cannot be read is the engine's failure."""
    assert error_status(event) == status


def test_text_about_errors_is_not_an_error() -> None:
    """A model may well write `data: {"error"`: inside JSON its quotes are escaped."""
    relay = event_relay(lambda data: None)
    relay(b"data: " + json.dumps({"text": 'data: {"error": 1}'}).encode() + b"\n\n")
    assert not relay.saw_error


def test_an_error_event_is_one_event_and_the_terminator() -> None:
    """In the shape that clients know from whole answers."""
    event, done, rest = OPENAI.broken(UpstreamTimeoutError("late")).split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"] == {
        "message": "late", "type": "GatewayTimeoutError", "param": None, "code": 504
    }  # fmt: skip
    assert (done, rest) == (b"data: [DONE]", b"")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1.50, "kv_transfer_params":null,"ec_transfer_params":null}',
        b'{"text":"\\"kv_transfer_params\\": {}"}',
        b"not json",
        b'{"kv_transfer_params": cut off',
        b"[1,  2]",
    ],
)
def test_an_answer_that_shows_nothing_keeps_every_byte(body: bytes) -> None:
    """The usual answer is not parsed, and text about parameters is text."""
    assert hide_internal(body) is body


@pytest.mark.parametrize("blank", ["", " ", "\n "])
def test_parameters_are_hidden_however_they_are_spelled(blank: str) -> None:
    """With blanks around the colon, and both kinds."""
    params = f'"kv_transfer_params"{blank}:{{"x":"secret"}},"ec_transfer_params":{{"y":"secret"}}'
    body = f'{{"a":[1.0,  2],{params}}}'.encode()
    hidden = hide_internal(body)
    assert b"secret" not in hidden
    assert hidden == b'{"a":[1.0,  2],"kv_transfer_params":null,"ec_transfer_params":null}'


def test_a_connections_own_headers_stay_on_it() -> None:
    """Hop-by-hop headers, and those that the router sets itself."""
    headers = [
        (b"content-type", b"a"), (b"connection", b"close"), (b"transfer-encoding", b"chunked"), (b"date", b"d"),
        (b"x-request-id", b"engine"), (b"x-disagg-path", b"forged"), (b"retry-after", b"3"),
        (b"content-length", b"1"),
    ]  # fmt: skip
    assert relayed_headers(headers) == [(b"content-type", b"a"), (b"retry-after", b"3")]
