"""A completion of several prompts: legs for each, one answer, one end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.http.messages import JSON_TYPE, SSE_TYPE, Request
from disagg.http.responder import Responder
from tests.support.mock_engine import Behaviour, MockEngine, breaks, error, streamed
from tests.support.rig import Reply, Rig, rig

PROMPTS = ["alpha", "beta", "gamma"]


def spoken() -> Behaviour:
    """Answer with the prompt in capitals, streamed in letters or whole."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        body = json.loads(request.body)
        text = str(body["prompt"]).upper()
        usage = {"prompt_tokens": len(text), "total_tokens": 2 * len(text), "completion_tokens": len(text)}
        head = {"id": f"cmpl-{text}", "object": "text_completion", "created": 1, "model": "m"}
        if not body.get("stream"):
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            respond.send(200, json.dumps({**head, "choices": [choice], "usage": usage}).encode(), (JSON_TYPE,))
            return
        respond.start(200, (SSE_TYPE,))
        for letter in text:
            chunk = {**head, "choices": [{"index": 0, "text": letter, "finish_reason": None}]}
            respond.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.001)
        if body.get("stream_options"):
            respond.write(b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n")
        respond.finish(b"data: [DONE]\n\n")

    return behave


async def ask(r: Rig, **more: Any) -> Reply:
    for engine in r.decode:
        engine.default = spoken()
    return await r.ask({"model": "m", "prompt": PROMPTS, **more})


def events(reply: Reply) -> list[Any]:
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.body.count(b"[DONE]") == 1
    return [json.loads(b.removeprefix(b"data: ")) for b in reply.body.split(b"\n\n")[:-2]]


async def test_each_prompt_has_legs_of_its_own_and_choices_are_in_order() -> None:
    """Usage is the sum, the id is one, and the request is disaggregated."""
    async with rig(decode=2) as r:
        reply = await ask(r)
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert reply.headers["x-disagg-decode"] == "decode-0,decode-1"
        body = reply.json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ALPHA"), (1, "BETA"), (2, "GAMMA")]
        assert body["usage"] == {"prompt_tokens": 14, "total_tokens": 28, "completion_tokens": 14}
        assert body["id"].startswith("cmpl-")
        assert sorted(b["prompt"] for b in r.p.bodies) == sorted(PROMPTS)
        await r.settled()
        assert await r.metric("disagg_requests_total") == 1


async def test_streams_are_interleaved_with_one_id_and_one_end() -> None:
    """Each event names its choice; the usage comes once, summed, last."""
    async with rig() as r:
        seen = events(await ask(r, stream=True, stream_options={"include_usage": True}))
        assert len({e["id"] for e in seen}) == 1
        texts = ["", "", ""]
        for event in seen[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == ["ALPHA", "BETA", "GAMMA"]
        assert [e["choices"][0]["index"] for e in seen[:3]] != [0, 0, 0], "they run at the same time"
        assert seen[-1]["choices"] == []
        assert seen[-1]["usage"]["total_tokens"] == 28
        await r.settled()


async def test_a_stream_has_no_usage_unless_it_was_asked_for() -> None:
    """As one engine does."""
    async with rig() as r:
        assert all(e["choices"] for e in events(await ask(r, stream=True)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_refused_refuses_the_request(stream: bool) -> None:
    """The engine's own words, once; what the others were doing is cancelled."""
    async with rig() as r:
        r.p.script.append(error(400, "too long", "BadRequestError"))
        reply = await ask(r, stream=stream)
        assert (reply.status, reply.json()["error"]["message"]) == (400, "too long")
        assert not reply.body.startswith(b"data")
        await r.settled()
        assert await r.metric("disagg_requests_total", outcome="refused") == 1


async def test_a_prompt_whose_stream_breaks_ends_all_of_them_with_one_error() -> None:
    """Exactly one terminal event; nothing follows it."""
    async with rig(retries=0) as r:
        first = b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n'
        r.d.script.append(streamed((first,), end="abort"))
        reply = await ask(r, stream=True)
        assert reply.complete
        assert reply.body.count(b'"error"') == 1
        assert reply.body.count(b"[DONE]") == 1
        assert json.loads(reply.body.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]["code"] == 502
        await r.settled()
        assert await r.metric("disagg_requests_total", outcome="broken") == 1


async def test_a_prompt_is_tried_again_on_its_own() -> None:
    """The others have streamed already, and go on."""
    async with rig(decode=2) as r:
        r.decode[0].script.append(breaks)
        texts = ["", "", ""]
        for event in events(await ask(r, stream=True)):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == ["ALPHA", "BETA", "GAMMA"]
        await r.settled()


async def test_a_client_that_leaves_ends_every_leg() -> None:
    """No prompt goes on for nobody."""
    async with rig() as r:
        r.d.default = streamed((b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n',), end="hang")
        call = await r.call({"model": "m", "prompt": PROMPTS, "stream": True})
        await call.head()
        await call.chunk()
        await call.close()
        await r.settled()
        assert r.d.departures == len(r.d.seen)


async def test_not_all_prompts_of_a_long_list_run_at_once() -> None:
    """One request must not take the whole fleet."""
    most = 0
    gate = asyncio.Event()

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        nonlocal most
        most = max(most, engine.open_requests)
        if engine.open_requests >= 16:
            gate.set()
        await gate.wait()
        await spoken()(engine, request, respond)

    async with rig() as r:
        r.d.default = behave
        reply = await r.ask({"model": "m", "prompt": [f"p{n}" for n in range(40)]})
        assert [c["text"] for c in reply.json()["choices"]] == [f"P{n}" for n in range(40)]
        assert most == 16
        await r.settled()


async def test_lists_beyond_all_measure_stay_on_one_engine() -> None:
    """One leg, not thousands."""
    async with rig() as r:
        reply = await r.ask({"model": "m", "prompt": ["x"] * 1025})
        assert reply.headers["x-disagg-path"] == "local;reason=prompt-list"
        assert (len(r.p.seen), len(r.d.seen)) == (0, 1)


async def test_one_prompt_in_a_list_is_one_prompt() -> None:
    """Its answer passes byte by byte."""
    async with rig() as r:
        reply = await r.ask({"model": "m", "prompt": ["x"]})
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert len(r.d.seen) == 1
