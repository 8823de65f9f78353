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
    max_model_len=1024,
    lease_s=5.0,
    prompt_tokens_details=True,
    auto_tool_choice=True,
    tool_call_parser="hermes",
    scale_out=True,
)
WISHES = wishes(MODEL)


@asynccontextmanager
async def engine(role: Role) -> AsyncIterator[Instance]:
    """A running engine; its blocks are all free at the end."""
    instance = Instance(
        replace(SETTINGS, role=role, engine_id=f"{role}-run1"),
        SimplePace(),
        Addresses("127.0.0.1", 0, "127.0.0.1", 0),
    )
    await instance.start()
    try:
        yield instance
        for _ in range(500):
            if not len(instance.core.engine.leases) and not instance.core.exchanges:
                break
            await asyncio.sleep(0.01)
        assert instance.core.engine.pool.free_blocks == instance.core.engine.pool.num_blocks
    finally:
        await instance.stop()


async def ask(url: str, wish: Wish) -> Answer:
    return await asyncio.to_thread(request, url, wish.path, wish.body)


@pytest.mark.parametrize("wish", WISHES, ids=[w.name for w in WISHES])
async def test_separate_stages_answer_as_one_engine_does(wish: Wish) -> None:
    """Same status, same JSON, same events in the same order; and the request took the way that it should."""
    async with engine(Role.BOTH) as one, engine(Role.PRODUCER) as prefill, engine(Role.CONSUMER) as decode:
        fleet = Fleet((Stage.PREFILL, Stage.DECODE))
        for stage, instance in ((Stage.PREFILL, prefill), (Stage.DECODE, decode)):
            identity = instance.settings.engine_id
            fleet.add(stage, stage, instance.url, identity, Peer(identity))
            fleet.mark(stage, identity, State.READY)
        router = Router(RouterConfig((MODEL,), max_model_len=1024), PullDialect(), fleet, tick_s=0.01)
        await router.start("127.0.0.1", 0)
        try:
            theirs = await ask(one.url, wish)
            ours = await ask(f"http://127.0.0.1:{router.port}", wish)
        finally:
            await router.stop()
    a, b = comparable(ours, wish.apart), comparable(theirs, wish.apart)
    assert a == b, f"ours:   {json.dumps(a)[:3000]}\ntheirs: {json.dumps(b)[:3000]}"
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    if theirs.status == 200:
        assert ours.headers.get("x-disagg-path", "").startswith(wish.way)
