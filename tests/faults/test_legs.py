"""The two legs of a request: what each engine is sent, and what the client gets."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support import mock_engine as mock
from tests.support.rig import MODEL, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


async def test_both_legs_carry_the_clients_body_and_the_handle_verbatim() -> None:
    """Nested values keep their bytes on both legs: a re-spelled number or re-ordered tool is another prompt."""
    nested = b'{"z":1.50,  "a":[1e3,"\\u00e9"]}'
    body = b'{"model":"m","prompt":"x","tools":' + nested + b',"max_tokens":5,"unknown":-0.0}'
    async with rig() as r:
        reply = await r.ask(body)
        assert (reply.status, reply.body) == (200, mock.WHOLE)
        prefill, decode = r.p.seen[0].body, r.d.seen[0].body
        assert nested in prefill
        assert nested in decode
        assert r.p.bodies[0] | {"max_tokens": 5} == r.d.bodies[0] | {"kv_transfer_params": {"keep": True}}
        handle = json.dumps(json.loads(mock.prefill_answer("engine-p0"))["kv_transfer_params"]).encode()
        assert b'"kv_transfer_params":' + handle in decode
        await r.settled()


async def test_what_only_a_router_may_set_is_removed_from_the_clients_body() -> None:
    """A client must not name the KV of others, nor the engine's request id, in any hiding place."""
    body = {
        "model": MODEL,
        "prompt": "x",
        "kv_transfer_params": {"engine": "other", "blocks": [9]},
        "bootstrap_room": 1,
        "request_id": "mine",
        "vllm_xargs": {"kv_transfer_params": {"engine": "other"}, "mine": 1},
    }
    async with rig() as r:
        assert (await r.ask(body)).status == 200
        assert r.p.bodies[0]["kv_transfer_params"] == {"keep": True}
        assert r.d.bodies[0]["kv_transfer_params"]["engine"] == "engine-p0"
        for sent in (r.p.bodies[0], r.d.bodies[0]):
            assert "bootstrap_room" not in sent
            assert "request_id" not in sent
            assert sent["vllm_xargs"] == {"mine": 1}
        assert (await r.ask(body | {"n": 2})).headers["x-disagg-path"] == "local;reason=n-greater-1"
        assert "kv_transfer_params" not in r.d.bodies[1]


async def test_headers_that_steer_engines_do_not_pass_and_credentials_do() -> None:
    """Authorization and trace context reach both legs; the engines' ids are the router's own."""
    async with rig() as r:
        reply = await r.ask(
            None,
            authorization="Bearer k",
            traceparent="00-1-2-01",
            x_request_id="mine",
            x_data_parallel_rank="3",
            x_prefiller_host_port="evil:1",
            connection="x-hop",
            x_hop="1",
            accept_encoding="gzip",
        )
        assert reply.headers["x-request-id"] == "mine"
        for request in (r.p.seen[0], r.d.seen[0]):
            sent = dict(request.headers)
            assert sent[b"authorization"] == b"Bearer k"
            assert sent[b"traceparent"] == b"00-1-2-01"
            assert set(sent) == {
                b"host",
                b"content-type",
                b"content-length",
                b"x-request-id",
                b"authorization",
                b"traceparent",
            }
            assert b"mine" not in sent[b"x-request-id"]


async def test_ids_of_the_legs_are_fresh_for_each_request() -> None:
    """Public id, leg id: two things; a repeated public id changes nothing about the other."""
    async with rig() as r:
        for _ in range(3):
            await r.ask(None, x_request_id="same")
        ids = [q.header(b"x-request-id") for q in r.d.seen]
        assert len(set(ids)) == 3
        assert [q.header(b"x-request-id") for q in r.p.seen] == ids


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "é", ""])
async def test_a_request_id_that_cannot_be_logged_is_replaced(bad: str) -> None:
    """Spaces, length and non-ASCII do not reach logs or headers."""
    async with rig() as r:
        assert (await r.ask(None, x_request_id=bad)).headers["x-request-id"] not in {bad, ""}


async def test_a_stream_is_relayed_event_by_event_as_it_is_made() -> None:
    """The client has the first event before the engine makes the second, byte for byte, with the engine's type."""
    gate = asyncio.Event()
    async with rig() as r:
        r.d.script.append(mock.gated(gate, mock.EVENTS[:1], mock.EVENTS[1:]))
        call = await r.call(STREAM)
        head = await asyncio.wait_for(call.head(), 5)
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert head.headers["x-disagg-path"] == "disaggregated"
        assert (head.headers["x-disagg-prefill"], head.headers["x-disagg-decode"]) == ("prefill-0", "decode-0")
        assert await asyncio.wait_for(call.chunk(), 5) == mock.EVENTS[0]
        gate.set()
        rest = b""
        while data := await call.chunk():
            rest += data
        assert rest == b"".join(mock.EVENTS[1:])
        await call.close()
        await r.settled()


async def test_prefill_is_never_streamed_and_decode_is_as_the_client_asked() -> None:
    """The prefill leg's answer has to be JSON with a handle in it."""
    async with rig() as r:
        assert (await r.ask(STREAM)).body == b"".join(mock.EVENTS)
        assert "stream" not in r.p.bodies[0]
        assert r.d.bodies[0]["stream"] is True


async def test_transfer_parameters_of_an_answer_never_reach_the_client() -> None:
    """They would let it read the KV of others; the key stays with null, as one engine answers."""
    async with rig() as r:
        r.d.script.append(mock.answers(200, b'{"id":1.50,"kv_transfer_params":{"blocks":[1]},"x":[1.0,  2]}'))
        assert (await r.ask()).body == b'{"id":1.50,"kv_transfer_params":null,"x":[1.0,  2]}'


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_prefill_is_the_clients_answer_and_decode_is_not_asked(stream: bool) -> None:
    """Status, type and message as the engine gave them, at once."""
    async with rig() as r:
        r.p.script.append(mock.error(400, "too long", "BadRequestError"))
        reply = await r.ask({"model": MODEL, "prompt": "x", "stream": stream})
        assert (reply.status, reply.body) == (400, mock.error_json(400, "too long", "BadRequestError"))
        assert reply.headers["content-type"] == "application/json"
        assert r.d.seen == []
        assert len(r.p.seen) == 1
        await r.settled()


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_a_refusal_of_decode_is_the_clients_answer_and_not_tried_again(status: int) -> None:
    """A 4xx is about the request: no other instance would answer differently."""
    async with rig(decode=2) as r:
        for d in r.decode:
            d.script.append(mock.error(status))
        reply = await r.ask(STREAM)
        assert (reply.status, reply.body) == (status, mock.error_json(status))
        assert sum(len(d.seen) for d in r.decode) == 1
        assert await r.metric("disagg_requests_total", outcome="refused") == 1
        await r.settled()


async def test_the_local_path_is_visible_and_strict_refuses_it() -> None:
    """A request that cannot be split runs on decode alone, with the reason in header and metric."""
    body = {"model": MODEL, "prompt": "x", "n": 2}
    async with rig() as r:
        reply = await r.ask(body)
        assert reply.headers["x-disagg-path"] == "local;reason=n-greater-1"
        assert "x-disagg-prefill" not in reply.headers
        assert r.p.seen == []
        assert await r.metric("disagg_requests_total", path="local", reason="n-greater-1") == 1
    async with rig(strict=True) as r:
        reply = await r.ask(body)
        assert reply.status == 501
        assert "n-greater-1" in reply.json()["error"]["message"]
        assert r.d.seen == []


async def test_without_a_prefill_pool_decode_serves_alone() -> None:
    """xEyPD and the like: no prefill leg, and the label says why."""
    async with rig(prefill=0) as r:
        reply = await r.ask(STREAM)
        assert reply.headers["x-disagg-path"] == "local;reason=no-prefill-pool"
        assert reply.body == b"".join(mock.EVENTS)


async def test_a_colocated_pool_gets_one_leg() -> None:
    """The baseline has one leg per request, balanced over its instances, and a label of its own."""
    async with rig(prefill=0, decode=2, colocated=True) as r:
        replies = [await r.ask() for _ in range(4)]
        assert {p.headers["x-disagg-path"] for p in replies} == {"colocated"}
        assert {p.headers["x-disagg-decode"] for p in replies} == {"colocated-0", "colocated-1"}
        assert "kv_transfer_params" not in r.d.bodies[0]


async def test_idle_instances_are_used_alike() -> None:
    """One request after the other reaches every instance of both stages."""
    async with rig(prefill=2, decode=2) as r:
        for _ in range(4):
            await r.ask()
        assert [len(e.seen) for e in [*r.prefill, *r.decode]] == [2, 2, 2, 2]
