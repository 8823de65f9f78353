"""A stream that has begun ends exactly once, whatever happens to its engine."""

from __future__ import annotations

import json

import pytest

from disagg.router.fleet import State
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Reply, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


def events(reply: Reply) -> list[bytes]:
    assert reply.complete
    assert reply.body.endswith(b"\n\n")
    return reply.body.split(b"\n\n")[:-1]


def error_of(event: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(event.removeprefix(b"data: "))["error"]
    return found


@pytest.mark.parametrize("rest", [b"", b'data: {"half', b"data: x\n"], ids=["at-event", "in-event", "in-line"])
async def test_decode_breaks_in_mid_stream(rest: bytes) -> None:
    """Whole events, then one error event, then [DONE]; half an event is not shown; nobody else is asked."""
    async with rig(decode=2) as r:
        r.d.script.append(mock.streamed((mock.EVENTS[0], rest), end="abort"))
        reply = await r.ask(STREAM)
        first, error, done = events(reply)
        assert (reply.status, first + b"\n\n", done) == (200, mock.EVENTS[0], b"data: [DONE]")
        assert error_of(error)["code"] == 502
        assert "decode-0" in str(error_of(error)["message"])
        assert r.decode[1].seen == []
        assert await r.metric("disagg_requests_total", outcome="broken") == 1
        await r.settled()


async def test_decode_falls_silent_in_mid_stream() -> None:
    """The idle limit ends it with a 504 inside the stream, and the engine sees the disconnect."""
    async with rig(idle_timeout_s=0.05) as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="hang"))
        _, error, done = events(await r.ask(STREAM))
        assert error_of(error)["code"] == 504
        assert done == b"data: [DONE]"
        await r.settled()
        assert r.d.departures == 1


async def test_a_stream_without_its_terminator_is_not_complete() -> None:
    """An engine that just stops is a failure that the client can tell from an end."""
    async with rig() as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:2]))
        received = events(await r.ask(STREAM))
        assert len(received) == 4
        assert "error" in json.loads(received[2].removeprefix(b"data: "))
        assert received[3] == b"data: [DONE]"


async def test_a_break_after_the_terminator_is_no_failure() -> None:
    """The client has everything; a second ending would be one too many."""
    async with rig() as r:
        r.d.script.append(mock.streamed(end="abort"))
        assert (await r.ask(STREAM)).body == b"".join(mock.EVENTS)
        assert await r.metric("disagg_requests_total", outcome="ok") == 1


async def test_an_engines_own_error_event_is_passed_on_and_counted() -> None:
    """It ends the stream itself; a second error event would be one too many."""
    error = b"data: " + mock.error_json(500) + b"\n\n"
    sent = (mock.EVENTS[0], error, b"data: [DONE]\n\n")
    async with rig() as r:
        r.d.script.append(mock.streamed(sent))
        assert (await r.ask(STREAM)).body == b"".join(sent)
        assert await r.metric("disagg_requests_total", outcome="broken") == 1


async def test_events_that_arrive_in_pieces_are_put_together() -> None:
    """Boundaries of packets and events have nothing to do with each other."""
    data = b"".join(mock.EVENTS)
    async with rig() as r:
        r.d.script.append(mock.streamed([data[i : i + 7] for i in range(0, len(data), 7)], pause_s=0.002))
        assert (await r.ask(STREAM)).body == data


async def test_an_incarnation_that_is_gone_ends_its_streams_at_once() -> None:
    """A process that the launcher knows to be dead is not waited for, even if its socket seems open."""
    async with rig() as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="hang"))
        call = await r.call(STREAM)
        await call.head()
        await call.chunk()
        r.fleet.mark("decode-0", "inc-decode-0", State.DOWN)
        rest = b""
        while data := await call.chunk():
            rest += data
        assert rest.count(b'{"error"') == 1
        assert rest.endswith(b"data: [DONE]\n\n")
        await call.close()
        await r.settled()
