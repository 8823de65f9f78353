"""An engine fails before the client has a byte: another one serves, with fresh ids, or the client is told why."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engines.base import Peer
from disagg.http.origin import Origin
from disagg.http.response import Response
from disagg.router.fleet import State
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Rig, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}
BROKEN = {
    "500": mock.error(500),
    "502": mock.error(502),
    "503": mock.error(503),
    "504": mock.error(504),
    "reset": mock.breaks,
}


def all_ids(r: Rig) -> list[bytes | None]:
    return [q.header(b"x-request-id") for e in r.prefill for q in e.seen]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", BROKEN)
async def test_prefill_fails_once(fault: str, stream: bool) -> None:
    """Another prefill instance serves; the second try has an id of its own."""
    async with rig(prefill=2) as r:
        r.prefill[0].script.append(BROKEN[fault])
        reply = await r.ask({"model": MODEL, "prompt": "x", "stream": stream})
        assert reply.status == 200
        assert reply.headers["x-disagg-prefill"] == "prefill-1"
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert len(set(all_ids(r))) == 2
        assert r.d.bodies[0]["kv_transfer_params"]["engine"] == "engine-p1"
        assert await r.metric("disagg_retries_total", stage="prefill") == 1
        await r.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", BROKEN)
async def test_decode_fails_once(fault: str, stream: bool) -> None:
    """The handle may be spent: the prompt is prefilled again, and another decode instance serves."""
    async with rig(prefill=2, decode=2) as r:
        r.decode[0].script.append(BROKEN[fault])
        reply = await r.ask({"model": MODEL, "prompt": "x", "stream": stream})
        assert reply.status == 200
        assert reply.headers["x-disagg-decode"] == "decode-1"
        assert len(set(all_ids(r))) == 2
        await r.settled()


async def test_decode_that_breaks_in_a_whole_answer_is_tried_again() -> None:
    """The client has nothing yet, so it need not know."""
    async with rig(decode=2) as r:
        r.decode[0].script.append(mock.half_whole())
        assert (await r.ask()).body == mock.WHOLE
        await r.settled()


async def test_decode_that_breaks_before_its_first_event_is_tried_again() -> None:
    """Headers, or half an event, are not a byte that the client has seen."""
    for sent in ((), (b'data: {"ha',)):
        async with rig(decode=2) as r:
            r.decode[0].script.append(mock.streamed(sent, end="abort"))
            reply = await r.ask(STREAM)
            assert reply.body == b"".join(mock.EVENTS)
            await r.settled()


async def test_a_stream_that_begins_with_an_engine_error_is_tried_again() -> None:
    """vLLM reports a failed KV load like this after a 200: nothing of it has been passed on."""
    failed = b"data: " + mock.error_json(500, "KV load failed") + b"\n\n"
    async with rig(decode=2) as r:
        r.decode[0].script.append(mock.streamed((failed, b"data: [DONE]\n\n")))
        assert (await r.ask(STREAM)).body == b"".join(mock.EVENTS)
    async with rig(retries=0) as r:
        r.d.script.append(mock.streamed((failed, b"data: [DONE]\n\n")))
        reply = await r.ask(STREAM)
        assert (reply.status, reply.json()["error"]["message"]) == (500, "KV load failed")
        await r.settled()


async def test_a_stream_that_begins_with_a_clients_error_is_passed_on() -> None:
    """A 4xx inside a stream is about the request, and arrives as one engine sends it."""
    events = (b"data: " + mock.error_json(400) + b"\n\n", b"data: [DONE]\n\n")
    async with rig() as r:
        r.d.script.append(mock.streamed(events))
        assert (await r.ask(STREAM)).body == b"".join(events)
        assert len(r.d.seen) == 1


async def test_one_instance_of_each_stage_is_asked_again() -> None:
    """With no other instance the same one gets a second chance: KV that could not be fetched can be made again."""
    async with rig() as r:
        r.d.script.append(mock.error(500))
        reply = await r.ask()
        assert reply.status == 200
        assert len(r.p.seen) == 2


async def test_an_error_that_stays_is_passed_on_with_its_status_and_message() -> None:
    """When nothing more may be tried the client gets what the last engine said."""
    async with rig(prefill=2, decode=2) as r:
        for d in r.decode:
            d.default = mock.error(503, "still loading")
        reply = await r.ask()
        assert (reply.status, reply.body) == (503, mock.error_json(503, "still loading"))
        assert sum(len(d.seen) for d in r.decode) == 3
        assert await r.metric("disagg_retries_total", stage="decode") == 2
        await r.settled()


async def test_no_retries_means_one_try() -> None:
    """The number is the operator's."""
    async with rig(prefill=2, retries=0) as r:
        r.prefill[0].script.append(mock.error(503))
        assert (await r.ask()).status == 503
        assert r.prefill[1].seen == []


async def test_a_request_that_kills_engines_is_not_given_to_a_third() -> None:
    """One prompt must not take the fleet down, nor move on to the decode side."""
    async with rig(prefill=4, retries=5) as r:
        for p in r.prefill:
            p.default = mock.breaks
        assert (await r.ask()).status == 502
        assert sum(len(p.seen) for p in r.prefill) == 2
        assert r.d.seen == []
        await r.settled()


async def test_a_prefill_that_refuses_connections_is_passed_over() -> None:
    """A dead port costs nothing but the attempt; the label stays disaggregated."""
    async with rig(prefill=2) as r:
        await r.prefill[0].stop()
        for _ in range(4):
            reply = await r.ask()
            assert (reply.status, reply.headers["x-disagg-prefill"]) == (200, "prefill-1")
        await r.settled()


async def test_a_decode_that_refuses_connections_does_not_cost_a_second_prefill() -> None:
    """Nothing was sent, so the handle is unspent and goes to the next instance."""
    async with rig(decode=2) as r:
        await r.decode[0].stop()
        reply = await r.ask()
        assert (reply.status, reply.headers["x-disagg-decode"]) == (200, "decode-1")
        assert len(r.p.seen) == 1
        assert await r.metric("disagg_kv_left_to_lease_total") == 0
        await r.settled()


async def test_without_any_decode_the_client_is_told_and_books_close() -> None:
    """502 with the instance's name; the KV that prefill holds is accounted for."""
    async with rig() as r:
        await r.d.stop()
        reply = await r.ask()
        assert reply.status == 502
        assert "decode-0" in reply.json()["error"]["message"]
        assert await r.metric("disagg_kv_left_to_lease_total") == 1
        await r.settled()


async def test_without_any_prefill_decode_serves_alone_and_says_so() -> None:
    """A fallback that everybody can see, in header and metric; strict deployments refuse it."""
    async with rig() as r:
        await r.p.stop()
        reply = await r.ask(STREAM)
        assert reply.body == b"".join(mock.EVENTS)
        assert reply.headers["x-disagg-path"] == "local;reason=prefill-unreachable"
        r.fleet.mark("prefill-0", "inc-prefill-0", State.DOWN)
        assert (await r.ask()).headers["x-disagg-path"] == "local;reason=no-prefill-instance"
        assert await r.metric("disagg_requests_total", path="local") == 2
    async with rig(strict=True) as r:
        r.fleet.mark("prefill-0", "inc-prefill-0", State.DOWN)
        assert (await r.ask()).status == 503
        assert r.d.seen == []


async def test_a_prefill_without_a_handle_is_counted_and_passed_over() -> None:
    """An instance that cannot hand over is not asked twice by one request."""
    async with rig(prefill=2) as r:
        r.prefill[0].default = mock.answers(200, b'{"usage":{}}')
        assert (await r.ask()).headers["x-disagg-prefill"] == "prefill-1"
        assert await r.metric("disagg_handoff_failures_total", reason="no-handle") == 1
    async with rig() as r:
        r.p.default = mock.answers(200, b"not json")
        assert (await r.ask()).headers["x-disagg-path"] == "local;reason=no-handle"
    async with rig(strict=True) as r:
        r.p.default = mock.answers(200, b"not json")
        assert (await r.ask()).status == 502
        await r.settled()


async def test_a_handle_of_another_engine_never_reaches_decode() -> None:
    """Prefill restarted unnoticed: its KV is not the KV of the incarnation that we know."""
    async with rig(prefill=2) as r:
        r.prefill[0].engine_id = "somebody-else"
        reply = await r.ask()
        assert (reply.status, reply.headers["x-disagg-prefill"]) == (200, "prefill-1")
        assert [b["kv_transfer_params"]["engine"] for b in r.d.bodies] == ["engine-p1"]
        assert await r.metric("disagg_handoff_failures_total", reason="foreign-engine") == 1


async def test_a_handle_that_has_aged_before_decode_is_sent_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond half of the lease the blocks could belong to another prompt: prefill runs again."""
    async with rig(lease_s=10) as r:
        request = r.router.client.request
        jumps = [6.0]

        async def slow_to_connect(origin: Origin, *rest: Any) -> Response:
            if origin.authority in r.d.url and jumps:
                r.skew[0] += jumps.pop()
            return await request(origin, *rest)

        monkeypatch.setattr(r.router.client, "request", slow_to_connect)
        assert (await r.ask()).status == 200
        assert len(r.p.seen) == 2
        assert len(r.d.seen) == 1
        assert await r.metric("disagg_handoff_failures_total", reason="stale") == 1
        await r.settled()
        assert await r.metric("disagg_kv_released_total", reason="stale") == 1
        await r.settled()


async def test_an_unspent_handle_that_has_aged_between_tries_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle kept for the next instance is looked at again."""
    async with rig(decode=2, lease_s=10) as r:
        await r.decode[0].stop()
        monkeypatch.setattr(r.router.metrics, "retried", lambda stage: r.skew.__setitem__(0, 6.0))
        assert (await r.ask()).headers["x-disagg-decode"] == "decode-1"
        assert len(r.p.seen) == 2


async def test_a_handle_dies_with_its_prefill_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill restarts between the legs, on the same port: its old blocks are gone, so it prefills again."""
    async with rig(decode=2) as r:
        await r.decode[0].stop()

        def restart(stage: object) -> None:
            r.p.engine_id = "engine-p0-again"
            r.fleet.update("prefill-0", "second", peer=Peer("engine-p0-again"))
            r.fleet.mark("prefill-0", "second", State.READY)

        monkeypatch.setattr(r.router.metrics, "retried", restart)
        assert (await r.ask()).status == 200
        assert [b["kv_transfer_params"]["engine"] for b in r.decode[1].bodies] == ["engine-p0-again"]


async def test_a_handle_is_not_sent_twice_when_a_kept_connection_breaks() -> None:
    """Decode may have read the KV before it closed: the same request needs a new prefill, not a second delivery."""
    async with rig() as r:
        await r.ask()
        r.d.script.append(mock.breaks)
        assert (await r.ask()).status == 200
        handed = [b["kv_transfer_params"] for b in r.d.bodies]
        assert (len(r.p.seen), len(handed)) == (3, 3)
        assert await r.metric("disagg_retries_total", stage="decode") == 1
        assert await r.metric("disagg_handoff_failures_total") == 0


async def test_prefill_and_local_legs_survive_a_kept_connection_that_breaks() -> None:
    """They have no effect that a second delivery could spoil, and no retry is counted."""
    async with rig() as r:
        await r.ask()
        r.p.script.append(mock.breaks)
        assert (await r.ask()).status == 200
        r.d.script.append(mock.breaks)
        assert (await r.ask({"model": MODEL, "prompt": "x", "n": 2})).status == 200
        assert await r.metric("disagg_retries_total") == 0
