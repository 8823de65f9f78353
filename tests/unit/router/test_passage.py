"""The short way of a stream: the client gets the same bytes by it as by the long way, whole events at a time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.http.limits import LegTimes
from disagg.router.record import Outcome
from tests.support.streams import Passing, chunk

DONE = b"data: [DONE]\n\n"
EVENT = b'data: {"text":" word"}\n\n'
ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'
events = st.lists(
    st.builds(lambda text: b'data: {"text":"%b"}\n\n' % text, st.text("ab 0\r", max_size=30).map(str.encode))
    | st.just(b"data: a\ndata: b\r\n\r\n")
    | st.just(b": ping\n\n"),
    min_size=1,
    max_size=8,
)


@given(events, st.data())
def test_however_a_stream_is_cut_its_bytes_arrive_once_in_order_and_in_whole_events(
    found: list[bytes], data: st.DataObject
) -> None:
    """Any events, in chunks of any size, in reads of any size: each write ends an event, and is framed well."""
    body = b"".join([EVENT, *found, DONE])
    wire = _framed(body, [EVENT, *found, DONE], data)
    # The exchange waits for the first byte of the body, so the first read has it.
    cuts = sorted(data.draw(st.sets(st.integers(6, len(wire) - 1), max_size=8)))
    reads = [wire[a:b] for a, b in pairwise([0, *cuts, len(wire)])]
    http_1_0 = data.draw(st.booleans())
    ends = {len(b"".join([EVENT, *found, DONE][:n])) for n in range(len(found) + 3)}
    asyncio.run(_pass(reads, body, ends, http_1_0=http_1_0))


def _framed(body: bytes, whole: list[bytes], data: st.DataObject) -> bytes:
    """The body in chunks: an event each, as engines do, or cut anywhere."""
    if data.draw(st.booleans()):
        return b"".join(map(chunk, whole)) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=6)))
    return b"".join(chunk(body[a:b]) for a, b in pairwise([0, *cuts, len(body)])) + b"0\r\n\r\n"


async def _pass(reads: list[bytes], body: bytes, ends: set[int], *, http_1_0: bool) -> None:
    rig = Passing(http_1_0=http_1_0)
    passing = await rig.begin(reads[0])
    for read in reads[1:]:
        rig.feed(read)
        if rig.client.wire.written:
            assert len(rig.client.body) in ends
    assert await passing is None
    received, complete = rig.client.read()
    assert received == body
    assert complete is not http_1_0  # without chunks the end is that of the connection
    assert rig.record.bytes_sent == len(body)
    assert rig.record.outcome is Outcome.OK


async def test_an_engines_chunks_reach_the_client_as_they_are() -> None:
    """Framing included, one write for each read, from the second event on; the end is parsed."""
    rig = Passing()
    passing = await rig.begin(chunk(EVENT))
    reads = [chunk(EVENT), chunk(EVENT) + chunk(EVENT), chunk(b": x\n\n" * 900)]
    for read in reads:
        rig.feed(read)
    assert rig.client.wire.written[1:] == reads
    rig.feed(chunk(DONE) + b"0\r\n\r\n")
    assert await passing is None
    assert rig.client.read() == (EVENT * 4 + b": x\n\n" * 900 + DONE, True)


async def test_each_read_is_one_gap_between_tokens_by_either_way() -> None:
    """Three reads after the first event, two of them by the short way, a hundredth of a second each."""
    rig = Passing()
    passing = await rig.begin(chunk(EVENT))
    rig.feed(chunk(EVENT))
    rig.feed(chunk(EVENT))
    rig.feed(chunk(DONE) + b"0\r\n\r\n")
    await passing
    page = rig.metrics.render().decode()
    assert 'disagg_inter_token_latency_seconds_count{path="disaggregated"} 3.0' in page
    assert 'disagg_inter_token_latency_seconds_bucket{le="0.015",path="disaggregated"} 3.0' in page
    assert 'disagg_inter_token_latency_seconds_bucket{le="0.0075",path="disaggregated"} 0.0' in page


async def test_an_error_event_is_seen_and_passes_in_its_place() -> None:
    """After chunks that went the short way, alone or behind another event in the same chunk."""
    for last in (ERROR, EVENT + ERROR):
        rig = Passing()
        passing = await rig.begin(chunk(EVENT))
        rig.feed(chunk(EVENT))
        rig.feed(chunk(last))
        rig.feed(chunk(DONE))
        rig.feed(b"0\r\n\r\n")
        assert await passing is None
        assert rig.client.read() == (EVENT + EVENT + last + DONE, True)
        assert rig.record.outcome is Outcome.BROKEN


async def test_half_an_event_is_held_back_until_the_engine_has_sent_the_rest() -> None:
    """Chunks that are whole are not passed on if the event in them is not, so a broken stream can end cleanly."""
    rig = Passing()
    passing = await rig.begin(chunk(EVENT))
    rig.feed(chunk(EVENT))
    rig.feed(chunk(EVENT[:9]))
    assert rig.client.body == EVENT * 2
    rig.feed(chunk(EVENT[9:]))
    assert rig.client.body == EVENT * 3
    rig.feed(chunk(EVENT) + chunk(EVENT[:9]))
    assert rig.client.body == EVENT * 4
    rig.engine.connection_lost(None)
    assert await passing is None
    received, complete = rig.client.read()
    assert complete
    assert received.startswith(EVENT * 4 + b'data: {"error"')
    assert received.endswith(b"}\n\n" + DONE)
    assert rig.record.outcome is Outcome.BROKEN


async def test_usage_is_found_in_what_went_the_short_way() -> None:
    """It comes right before the terminator; both may have passed unparsed, in one read or in two."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
    for reads in ([chunk(usage), chunk(DONE)], [chunk(usage) + chunk(DONE)]):
        rig = Passing()
        passing = await rig.begin(chunk(EVENT))
        for read in reads:
            rig.feed(read)
        rig.feed(b"0\r\n\r\n")
        assert await passing is None
        assert rig.record.completion_tokens == 5


async def test_nothing_is_written_to_a_client_that_has_left() -> None:
    """Its handler may not know yet when the engine's next chunk comes."""
    rig = Passing()
    passing = await rig.begin(chunk(EVENT))
    rig.feed(chunk(EVENT))
    rig.client.leave()
    rig.feed(chunk(EVENT))
    assert len(rig.client.wire.written) == 2
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert rig.engine.transport.is_closing()


async def test_a_slow_client_stops_the_engine_and_its_time_is_not_counted() -> None:
    """Backpressure from a write by the short way; after it the next gap begins anew."""
    rig = Passing()
    passing = await rig.begin(chunk(EVENT))
    wire = rig.engine.transport
    rig.feed(chunk(EVENT))
    rig.client.responder.flow_changed(False)
    assert not wire.is_reading()
    rig.clock += 50.0
    rig.client.responder.flow_changed(True)
    assert wire.is_reading()
    rig.feed(chunk(EVENT))
    rig.feed(chunk(DONE) + b"0\r\n\r\n")
    await passing
    page = rig.metrics.render().decode()
    assert 'disagg_inter_token_latency_seconds_count{path="disaggregated"} 2.0' in page
    assert 'disagg_inter_token_latency_seconds_bucket{le="0.015",path="disaggregated"} 2.0' in page


async def test_silence_is_counted_from_the_last_chunk_by_either_way() -> None:
    """The limit does not end a stream that goes on, nor forget one that does not."""
    rig = Passing(LegTimes(60.0, 8.0, 600.0))
    passing = await rig.begin(chunk(EVENT))
    parsed = rig.engine.deadline
    before = rig.engine.progress
    rig.feed(chunk(EVENT))
    assert rig.engine.progress != before
    rig.clock += 3.0
    rig.engine.expire()  # as the sweeper does when it believes that the deadline has passed
    await asyncio.sleep(0)
    assert not passing.done()
    assert rig.engine.deadline == pytest.approx(parsed - 3.0, abs=2.0)
    rig.clock += 5.0
    rig.engine.expire()
    assert await passing is None
    assert rig.record.outcome is Outcome.BROKEN
    assert b"silent for 8 s" in rig.client.body
