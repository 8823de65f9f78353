"""`recover_streams`: a stream whose decode instance dies goes on elsewhere, word for word, or says why not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from disagg.engines.emulated.faults import Faults
from disagg.engines.emulated.settings import SimplePace
from tests.support import mock_engine as mock
from tests.support.rig import Call, Reply, rig
from tests.support.toy_fleet import MODEL, ToyFleet, toy_fleet
from tests.support.wire import metric

SLOW = SimplePace(decode_step_s=0.01)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "the sea is wide and deep " * 5}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "the sea is wide and deep " * 5}]}
    return {
        "model": MODEL,
        **prompt,
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


async def send(port: int, path: str, body: dict[str, Any]) -> Reply:
    call = await Call.open(port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    call.send(head.encode() + data)
    try:
        return await asyncio.wait_for(call.reply(), 30)
    finally:
        await call.close()


@dataclass
class Story:
    """A stream as a client puts it together."""

    text: str = ""
    roles: int = 0
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    shown_ids: bool = False


def read(body: bytes) -> Story:
    story = Story()
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            story.errors.append(chunk["error"]["message"])
            continue
        story.ids.add(chunk["id"])
        story.created.add(chunk["created"])
        if chunk.get("usage"):
            story.usage.append(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            story.roles += "role" in delta
            story.text += delta.get("content") or choice.get("text") or ""
            story.tokens += choice.get("token_ids") or []
            story.shown_ids |= bool(choice.get("token_ids") or choice.get("prompt_token_ids"))
            if choice.get("finish_reason"):
                story.finish.append(choice["finish_reason"])
        story.shown_ids |= bool(chunk.get("prompt_token_ids"))
    return story


async def right(up: ToyFleet, path: str, body: dict[str, Any]) -> Story:
    return read((await send(up.alone.addresses.port, path, body)).body)


async def recoveries(up: ToyFleet) -> dict[str, float]:
    call = await Call.open(up.router.port)
    call.send(b"GET /metrics HTTP/1.1\r\nhost: t\r\n\r\n")
    page = (await call.reply()).body.decode()
    await call.close()
    names = ("resumed", "completed", "no-retry-left")
    return {n: metric(page, "disagg_stream_recoveries_total", outcome=n) for n in names}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_decode_that_is_killed_in_mid_stream_is_not_noticed(path: str) -> None:
    """The client has the words, the one id, the one role and the one bill of an uninterrupted run."""
    body = request_of(path)
    async with toy_fleet(2, 2, pace=SLOW, recover_streams=True) as up:
        expected = await right(up, path, body)
        sending = asyncio.create_task(send(up.router.port, path, body))
        while not (busy := [d for d in up.decode if d.core.engine.running]):
            await asyncio.sleep(0.005)
        while not any(len(s.output) > 6 for s in busy[0].core.engine.running):
            await asyncio.sleep(0.005)
        await up.crash(busy[0])
        story = read((await sending).body)
        assert story.errors == []
        assert (story.text, story.finish) == (expected.text, expected.finish)
        assert (len(story.ids), len(story.created), story.roles) == (1, 1, expected.roles)
        assert not story.shown_ids
        assert [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in story.usage] == [
            (u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in expected.usage
        ]
        assert await recoveries(up) == {"resumed": 1, "completed": 0, "no-retry-left": 0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("shows_ids", [False, True])
async def test_a_stream_may_break_at_any_byte(path: str, shows_ids: bool) -> None:
    """Inside an event, between two, before the bill, before the terminator: always the same words, each once."""
    body = request_of(path, **({"return_token_ids": True} if shows_ids else {}))
    async with toy_fleet(1, 2, recover_streams=True, retry_budget=1.0, breaker_failures=99) as up:
        expected = await right(up, path, body)
        whole = len((await send(up.decode[0].addresses.port, path, {**body, "return_token_ids": True})).body)
        for cut in (*range(300, whole, whole // 14), whole - 20, whole - 3):
            up.decode[0].core.faults.set((Faults(close_at_byte=cut),))
            up.decode[1].core.faults.set(())
            story = read((await send(up.router.port, path, body)).body)
            assert story.errors == [], cut
            assert (story.text, story.finish) == (expected.text, expected.finish), cut
            assert story.tokens == expected.tokens, cut
            assert story.roles == expected.roles, cut
            assert [u["total_tokens"] for u in story.usage] == [u["total_tokens"] for u in expected.usage], cut
        assert (await recoveries(up))["resumed"] > 5


async def test_no_block_stays_behind() -> None:
    """The first prefill's blocks were fetched, the second's as well."""
    async with toy_fleet(1, 2, pace=SLOW, recover_streams=True) as up:
        up.decode[0].core.faults.set((Faults(close_at_byte=2500),))
        for _ in range(4):
            assert read((await send(up.router.port, CHAT, request_of(CHAT))).body).errors == []
        for engine in (*up.prefill, *up.decode):
            await up.empty(engine)


async def test_a_stream_goes_on_where_the_clients_limit_is() -> None:
    """The second part has what the first one left of it, floor included."""
    body = request_of(COMPLETIONS, min_tokens=20)
    async with toy_fleet(1, 2, recover_streams=True) as up:
        expected = await right(up, COMPLETIONS, body)
        up.decode[0].core.faults.set((Faults(close_at_byte=2000),))
        stories = [read((await send(up.router.port, COMPLETIONS, body)).body) for _ in range(2)]
        assert [s.text for s in stories] == [expected.text] * 2
        assert [s.usage[-1]["completion_tokens"] for s in stories] == [24, 24]
        assert (await recoveries(up))["resumed"] >= 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "n-greater-1"),
        ({"stop": ["x"]}, "stop-strings"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "structured-output"),
    ],
)
async def test_a_stream_that_cannot_go_on_says_why(fields: dict[str, Any], why: str) -> None:
    """One error event with the reason, and the terminator."""
    async with rig(recover_streams=True, dialect=mock.IdsDialect(), decode=2) as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="abort"))
        reply = await r.ask({"model": "m", "prompt": "x", "stream": True, **fields})
        events = reply.body.decode().split("\n\n")
        assert len(events) == 4
        assert why in events[1]
        assert events[2] == "data: [DONE]"
        assert await r.metric("disagg_stream_recoveries_total", outcome=why) == 1
        await r.settled()


CHUNK = b'data: {"id":"a","choices":[{"index":0,"text":"hi","token_ids":[5],"prompt_token_ids":[1,2]}]}\n\n'


@pytest.mark.parametrize(
    ("first", "why"),
    [([mock.EVENTS[0]], "no-token-ids"), ([CHUNK], "no-retry-left")],
)
async def test_without_ids_or_retries_it_ends(first: Sequence[bytes], why: str) -> None:
    """An engine that tells no ids, or one death too many."""
    async with rig(recover_streams=True, dialect=mock.IdsDialect(), decode=2, retries=0) as r:
        r.d.script.append(mock.streamed(first, end="abort"))
        reply = await r.ask({"model": "m", "prompt": "x", "stream": True})
        assert why in reply.body.decode()
        await r.settled()


async def test_an_error_that_the_engine_puts_into_its_stream_is_a_death_too() -> None:
    """It is held back, the stream goes on, and the client sees no error."""
    failed = b'data: {"error":{"message":"EngineCore encountered an issue","type":"x","code":500}}\n\n'
    rest = b'data: {"id":"b","choices":[{"index":0,"text":" there","token_ids":[6]}]}\n\n'
    async with rig(recover_streams=True, dialect=mock.IdsDialect(), decode=2) as r:
        r.d.script.append(mock.streamed([CHUNK + failed, mock.EVENTS[-1]]))
        r.decode[1].script.append(mock.streamed([rest, mock.EVENTS[-1]]))
        reply = await r.ask({"model": "m", "prompt": "x", "stream": True})
        texts = [json.loads(e[6:])["choices"][0]["text"] for e in reply.body.decode().split("\n\n")[:-2]]
        assert texts == ["hi", " there"]
        assert {json.loads(e[6:])["id"] for e in reply.body.decode().split("\n\n")[:-2]} == {"a"}
        assert r.decode[1].bodies[0]["prompt"] == [1, 2, 5]
        assert r.decode[1].bodies[0]["max_tokens"] == 15
        await r.settled()


async def test_when_it_is_off_no_chunk_is_touched() -> None:
    """Engines are not asked for ids, and bytes pass as they came."""
    async with rig(dialect=mock.IdsDialect()) as r:
        reply = await r.ask({"model": "m", "prompt": "x", "stream": True})
        assert reply.body == b"".join(mock.EVENTS)
        assert "return_token_ids" not in r.d.bodies[0]
