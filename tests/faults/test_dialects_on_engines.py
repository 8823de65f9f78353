"""Every handoff dialect, over engines that count their blocks: right words, bounded waits, nothing left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.engines.emulated.faults import Faults, Match
from disagg.engines.emulated.settings import DialectName, SimplePace
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.http.client import Client
from disagg.http.origin import Origin
from disagg.launch.handoff_probe import ProbePlan, Side, probe_handoff
from tests.faults.test_recovery import CHAT, COMPLETIONS, read, request_of, right, send
from tests.support.rig import Call
from tests.support.toy_fleet import DIALECTS, MODEL, ToyFleet, peer_of, toy_fleet

NAMES: list[DialectName] = list(DIALECTS)
TOGETHER: list[DialectName] = ["nixl-push", "mooncake", "sglang"]
RELEASING: list[DialectName] = ["nixl-pull", "mooncake"]


async def at_home(up: ToyFleet) -> None:
    """No engine holds a block, and the router has no connection in use."""
    for engine in (*up.prefill, *up.decode):
        await up.empty(engine)
    while up.router.client.busy_connections:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", NAMES)
async def test_the_words_are_one_engines(name: DialectName, path: str) -> None:
    """Streamed or not, over two pairs, several at once: the text is what one engine says that computes all of it."""
    async with toy_fleet(2, 2, dialect=name) as up:
        bodies = [request_of(path, user=f"{n}", max_tokens=4 + n) for n in range(6)]
        expected = [await right(up, path, body) for body in bodies]
        replies = await asyncio.gather(*(send(up.router.port, path, body) for body in bodies))
        assert {r.headers["x-disagg-path"] for r in replies} == {"disaggregated"}
        assert [read(r.body).text for r in replies] == [story.text for story in expected]
        await at_home(up)


@pytest.mark.parametrize("name", NAMES)
async def test_a_prefill_that_is_refused_ends_decode(name: DialectName) -> None:
    """A prompt over the limit: the client has the engine's 400 at once, and nobody waits for KV."""
    async with toy_fleet(dialect=name) as up:
        body = request_of(COMPLETIONS, prompt=list(range(3000)))
        reply = await asyncio.wait_for(send(up.router.port, COMPLETIONS, body), 5)
        assert reply.status == 400
        await at_home(up)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_leg_that_fails_is_tried_on_another_pair(name: DialectName, stage: str) -> None:
    """503 from one engine: the request is served by the others, and its partner does not wait for it."""
    async with toy_fleet(2, 2, dialect=name) as up:
        body = request_of(COMPLETIONS)
        expected = await right(up, COMPLETIONS, body)
        sick = (up.prefill if stage == "prefill" else up.decode)[0]
        sick.core.faults.set((Faults(status=503),))
        for _ in range(3):
            reply = await asyncio.wait_for(send(up.router.port, COMPLETIONS, body), 10)
            assert read(reply.body).text == expected.text
        await at_home(up)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("name", TOGETHER)
async def test_an_engine_that_is_gone_does_not_hold_its_partner(name: DialectName, stage: str) -> None:
    """The connection is refused: the other leg would wait for its partner for minutes."""
    async with toy_fleet(2, 2, dialect=name) as up:
        body = request_of(COMPLETIONS)
        expected = await right(up, COMPLETIONS, body)
        gone = (up.prefill if stage == "prefill" else up.decode)[0]
        await gone.stop()
        for _ in range(2):
            reply = await asyncio.wait_for(send(up.router.port, COMPLETIONS, body), 10)
            assert read(reply.body).text == expected.text
        for engine in (*up.prefill, *up.decode):
            if engine is not gone:
                await up.empty(engine)


@pytest.mark.parametrize("name", NAMES)
async def test_clients_that_leave_leave_nothing_behind(name: DialectName) -> None:
    """In every phase of a request, decode included; the next request is served as if nothing had been."""
    slow = SimplePace(prefill_tokens_per_s=1500.0, decode_step_s=0.01)
    async with toy_fleet(dialect=name, pace=slow, linger_s=2.0) as up:
        calls = []
        for n in range(8):
            call = await Call.open(up.router.port)
            body = request_of(COMPLETIONS, prompt=f"{n} the sea is wide " * 8)
            call.send(_wire(body))
            calls.append(call)
        for call in calls:
            await asyncio.sleep(0.03)
            await call.close()
        await at_home(up)
        body = request_of(COMPLETIONS)
        reply = await send(up.router.port, COMPLETIONS, body)
        assert read(reply.body).text == (await right(up, COMPLETIONS, body)).text


def choices_of(body: bytes) -> list[tuple[int, str]]:
    """The choices of a completion, streamed or whole."""
    if not body.startswith(b"data: "):
        return sorted((c["index"], c["text"]) for c in json.loads(body)["choices"])
    texts: dict[int, str] = {}
    for event in body.split(b"\n\n")[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return sorted(texts.items())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_several_choices_are_one_engines_and_their_prompt_is_prefills(name: DialectName, stream: bool) -> None:
    """Decode computes what is behind the last whole block, for each choice, and nothing else of the prompt."""
    async with toy_fleet(2, 2, dialect=name) as up:
        for n in (2, 5):
            body = request_of(COMPLETIONS, prompt=list(range(7, 7 + 100 + n)), n=n, temperature=1.0, seed=n)
            if not stream:
                del body["stream"], body["stream_options"]
            before = sum(e.core.engine.counters.computed_prompt_tokens for e in up.decode)
            reply = await send(up.router.port, COMPLETIONS, body)
            computed = sum(e.core.engine.counters.computed_prompt_tokens for e in up.decode) - before
            expected = await send(up.alone.addresses.port, COMPLETIONS, body)
            assert len({text for _, text in choices_of(expected.body)}) == n, "the choices have to differ"
            assert choices_of(reply.body) == choices_of(expected.body)
            primed = "" if name == "sglang" else ";primed=n-greater-1"
            assert reply.headers["x-disagg-path"] == f"disaggregated{primed}"
            # 16 tokens are a block.
            assert computed <= n * ((100 + n) % 16) + 2
        await at_home(up)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "sglang"])
async def test_several_choices_stay_where_a_cache_would_not_help(name: DialectName) -> None:
    """A decode engine without a prefix cache, or with blocks larger than the prompt, says so on its metrics page."""
    body = request_of(COMPLETIONS, prompt=list(range(7, 107)), n=2, temperature=1.0, seed=1)
    wanted: dict[str, dict[str, Any]] = {"no-prefix-cache": {"prefix_caching": False}}
    if name == "nixl-pull":
        # Elsewhere blocks of unequal size cannot be handed over at all.
        wanted["within-one-block"] = {"block_size": 128}
    for reason, settings in wanted.items():
        async with toy_fleet(dialect=name, decode_with=settings) as up:
            reply = await send(up.router.port, COMPLETIONS, body)
            assert reply.headers["x-disagg-path"] == f"local;reason={reason}"
            assert choices_of(reply.body) == choices_of((await send(up.alone.addresses.port, COMPLETIONS, body)).body)
            await at_home(up)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "sglang"])
async def test_clients_of_several_choices_that_leave_leave_nothing_behind(name: DialectName) -> None:
    """Before, while and after the KV is fetched, and while choices are made."""
    slow = SimplePace(prefill_tokens_per_s=1500.0, decode_step_s=0.01)
    async with toy_fleet(dialect=name, pace=slow, linger_s=2.0) as up:
        for n in range(8):
            call = await Call.open(up.router.port)
            call.send(_wire(request_of(COMPLETIONS, prompt=f"{n} the sea is wide " * 8, n=3, temperature=1.0)))
            await asyncio.sleep(0.03 * n)
            await call.close()
        await at_home(up)
        body = request_of(COMPLETIONS, n=2, temperature=1.0, seed=4)
        reply = await send(up.router.port, COMPLETIONS, body)
        assert choices_of(reply.body) == choices_of((await send(up.alone.addresses.port, COMPLETIONS, body)).body)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "sglang"])
async def test_several_choices_are_tried_on_another_pair(name: DialectName, stage: str) -> None:
    """503 from one engine, on whichever of the legs: right words all the same, and no block is held."""
    async with toy_fleet(2, 2, dialect=name) as up:
        body = request_of(COMPLETIONS, n=3, temperature=1.0, seed=4)
        expected = choices_of((await send(up.alone.addresses.port, COMPLETIONS, body)).body)
        sick = (up.prefill if stage == "prefill" else up.decode)[0]
        for fault in (Faults(status=503), Faults(status=503, match=Match(body='"n":3'))):
            sick.core.faults.set((fault,))
            for _ in range(3):
                reply = await asyncio.wait_for(send(up.router.port, COMPLETIONS, body), 20)
                assert choices_of(reply.body) == expected
        await at_home(up)


@pytest.mark.parametrize("name", RELEASING)
async def test_kv_that_decode_refuses_is_free_before_its_lease_ends(name: DialectName) -> None:
    """The lease is 20 s and a meeting minutes; the blocks are home as soon as the client has its answer."""
    async with toy_fleet(dialect=name) as up:
        served = Match(body=MODEL_FIELD)
        up.decode[0].core.faults.set((Faults(status=422, match=served),))
        reply = await asyncio.wait_for(send(up.router.port, COMPLETIONS, request_of(COMPLETIONS)), 10)
        assert reply.status == 422
        await up.empty(up.prefill[0], within_s=5)


MODEL_FIELD = f'"model":"{MODEL}"'


@pytest.mark.parametrize("name", NAMES)
async def test_readiness_is_proved_by_kv_that_moved(name: DialectName) -> None:
    """The launcher's probe works over each of them."""
    if name == "sglang":
        pytest.skip("the launcher starts no SGLang engines")
    async with toy_fleet(dialect=name) as up:
        client = Client()
        plan = ProbePlan(MODEL, DIALECTS[name], VllmAdapter().probe(), 16, 2048, 10.0)
        sides = [Side(_origin(e.url), peer_of(e)) for e in (up.prefill[0], up.decode[0])]
        try:
            proof = await probe_handoff(client, plan, sides[0], sides[1])
        finally:
            await client.close()
        assert proof.moved_tokens
        await at_home(up)


def _wire(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def _origin(url: str) -> Origin:
    return Origin.parse(url)
