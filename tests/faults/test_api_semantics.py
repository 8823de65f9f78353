"""Everything that the APIs have, asked of one emulated engine and of separate stages: the answers are the same.

The same requests as against the real engine (`tests/e2e`), as far as the emulated one knows them: a request that it
refuses has to be refused alike.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from disagg.engines.base import Peer
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import EngineSettings, Role, SimplePace
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.topology.spec import Stage
from tests.e2e.semantics import Wish, comparable, wishes
from tests.support.wire import Answer, request

MODEL = "toy"
SETTINGS = EngineSettings(
    model=MODEL,
    served_model_names=(MODEL,),
    engine_id="",
    max_model_len=2048,
    lease_s=3.0,
    prompt_tokens_details=True,
    auto_tool_choice=True,
    tool_call_parser="hermes",
    scale_out=True,
)
WISHES = wishes(MODEL)


REASONING = ("chat", "chat-streamed", "chat-tools-auto", "chat-json-schema-streamed", "message-streamed", "response")
"""Requests that are sent to a model that thinks as well."""


@asynccontextmanager
async def engine(role: Role, **more: Any) -> AsyncIterator[Instance]:
    """A running engine; its blocks are all free at the end."""
    settings = replace(SETTINGS, role=role, engine_id=f"{role}-run1", **more)
    instance = Instance(settings, SimplePace(), Addresses("127.0.0.1", 0, "127.0.0.1", 0))
    await instance.start()
    try:
        yield instance
        # Longer than the lease: a prefill that is cut off just when it ends leaves its KV to that.
        for _ in range(2000):
            if not len(instance.core.engine.leases) and not instance.core.exchanges:
                break
            await asyncio.sleep(0.01)
        assert instance.core.engine.pool.free_blocks == instance.core.engine.pool.num_blocks
    finally:
        await instance.stop()


async def ask(url: str, wish: Wish) -> Answer:
    return await asyncio.to_thread(request, url, wish.path, wish.body)


async def ask_both(wish: Wish, **more: Any) -> tuple[Answer, Answer]:
    """The answers of separate stages and of one engine."""
    async with (
        engine(Role.BOTH, **more) as one,
        engine(Role.PRODUCER, **more) as prefill,
        engine(Role.CONSUMER, **more) as decode,
    ):
        fleet = Fleet((Stage.PREFILL, Stage.DECODE))
        for stage, instance in ((Stage.PREFILL, prefill), (Stage.DECODE, decode)):
            identity = instance.settings.engine_id
            fleet.add(stage, stage, instance.url, identity, Peer(identity))
            fleet.mark(stage, identity, State.READY)
        router = Router(RouterConfig((MODEL,), max_model_len=2048), PullDialect(), fleet, tick_s=0.01)
        await router.start("127.0.0.1", 0)
        try:
            return await ask(f"http://127.0.0.1:{router.port}", wish), await ask(one.url, wish)
        finally:
            await router.stop()


def check(wish: Wish, ours: Answer, theirs: Answer) -> None:
    a, b = comparable(ours, wish.apart), comparable(theirs, wish.apart)
    assert a == b, f"ours:   {json.dumps(a)[:3000]}\ntheirs: {json.dumps(b)[:3000]}"
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    if theirs.status == 200:
        assert ours.headers.get("x-disagg-path", "").startswith(wish.way)


@pytest.mark.parametrize("wish", WISHES, ids=[w.name for w in WISHES])
async def test_separate_stages_answer_as_one_engine_does(wish: Wish) -> None:
    """Same status, same JSON, same events in the same order; and the request took the way that it should."""
    check(wish, *await ask_both(wish))


@pytest.mark.parametrize("name", REASONING)
async def test_reasoning_is_told_apart_as_one_engine_does(name: str) -> None:
    """Decode parses it; prefill's one token is nobody's."""
    wish = next(w for w in WISHES if w.name == name)
    ours, theirs = await ask_both(wish, reasoning_parser="qwen3")
    check(wish, ours, theirs)
    assert b"reasoning" in theirs.body or b"thinking" in theirs.body


async def test_an_adapter_is_used_on_both_stages() -> None:
    """Its words are its own, and the KV that is handed over is its own."""
    wish = Wish("adapter", "/v1/completions", {"model": "tuned", "prompt": "The sea", "max_tokens": 8})
    ours, theirs = await ask_both(wish, lora_modules=(("tuned", "/tuned"),))
    check(wish, ours, theirs)
    base, _ = await ask_both(replace(wish, body={**wish.body, "model": MODEL}), lora_modules=(("tuned", "/tuned"),))
    assert base.json()["choices"][0]["text"] != ours.json()["choices"][0]["text"]


async def test_a_priority_reaches_both_stages() -> None:
    """An engine that does not schedule by priority refuses one, so it has to arrive."""
    wish = Wish("priority", "/v1/completions", {"model": MODEL, "prompt": "The sea", "max_tokens": 8, "priority": 3})
    for priorities in (True, False):
        check(wish, *await ask_both(wish, priorities=priorities))
