"""Exact affinity in front of emulated engines: the router goes by what their caches really hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from disagg.engines.base import Api
from disagg.engines.emulated.cache_events import EventsConfig
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import EngineSettings, SimplePace
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.errors import ConfigError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE
from disagg.http.origin import Origin, Outgoing
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.intake import Intake
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage
from tests.support.rig import Reply, Rig

EVENTS = EventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
SETTINGS = EngineSettings("toy", ("toy",), "engine", num_blocks=512, max_model_len=4096, kv_events=EVENTS)
WORDS = " ".join(f"word{i}" for i in range(120))


async def post(url: str, path: str, body: bytes) -> int:
    """Ask an engine itself, behind the router's back; the answer's status."""
    client = Client()
    try:
        outgoing = Outgoing("POST", path, (JSON_TYPE,), body)
        response = await client.request(Origin.parse(url), outgoing, LegTimes(20, 20, 20))
        await response.read()
        return response.status
    finally:
        await client.close()


class Fronted:
    """Engines that do it all, and a router in front of them."""

    def __init__(self, engines: list[Instance], fleet: Fleet, router: Router) -> None:
        self.engines = engines
        self.rig = Rig(fleet, [], [], router)

    async def ask(self, prompt: object, **more: Any) -> Reply:
        body = {"model": "toy", "max_tokens": 2, "ignore_eos": True, "prompt": prompt, **more}
        reply = await self.rig.ask(body)
        assert reply.status == 200, reply.body
        return reply

    async def blocks(self, engine: str) -> float:
        return await self.rig.metric("disagg_kv_index_blocks", engine=engine)

    async def until_known(self, engine: str, blocks: int) -> None:
        async with asyncio.timeout(20):
            while await self.blocks(engine) < blocks:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fronted(count: int = 3, **spec: Any) -> AsyncIterator[Fronted]:
    engines = [
        Instance(replace(SETTINGS, engine_id=f"e{i}"), SimplePace(), Addresses("127.0.0.1", 0, "127.0.0.1", 0))
        for i in range(count)
    ]
    fleet = Fleet((Stage.DECODE,))
    for i, engine in enumerate(engines):
        await engine.start()
        fleet.add(f"decode-{i}", Stage.DECODE, engine.url, f"e{i}")
        fleet.mark(f"decode-{i}", f"e{i}", State.READY)
    config = RouterConfig(
        ("toy",), RouterSpec(decode_policy="kv-affinity", load_interval_s=0, **spec), probe=VllmAdapter().probe()
    )
    router = Router(config, PullDialect(), fleet, tick_s=0.01)
    await router.start("127.0.0.1", 0)
    try:
        yield Fronted(engines, fleet, router)
    finally:
        await router.stop()
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("prompt", [list(range(300, 400)), WORDS], ids=["token-ids", "text"])
async def test_a_prompt_goes_to_the_engine_that_holds_it(prompt: object) -> None:
    """Also one that only begins with it, and one that another client brought there behind the router's back."""
    async with fronted() as f:
        body = {"prompt": prompt, "max_tokens": 1}
        assert await post(f.engines[1].url, "/v1/completions", json.dumps(body).encode()) == 200
        await f.until_known("decode-1", 4)
        longer = [*prompt, *range(50)] if isinstance(prompt, list) else f"{prompt} and more of it"
        served = {(await f.ask(p)).headers["x-disagg-decode"] for p in (prompt, longer, prompt)}
        assert served == {"decode-1"}


async def test_another_prompt_is_spread_over_all() -> None:
    """Affinity is a matter of the prompt, not a habit."""
    async with fronted() as f:
        served = {(await f.ask([i * 10 + 300] * 40)).headers["x-disagg-decode"] for i in range(6)}
        assert served == {"decode-0", "decode-1", "decode-2"}


async def test_an_engine_that_empties_its_cache_is_not_preferred_any_more() -> None:
    """What it held before is gone from the index at once."""
    async with fronted() as f:
        prompt = list(range(300, 400))
        first = (await f.ask(prompt)).headers["x-disagg-decode"]
        await f.until_known(first, 4)
        engine = f.engines[int(first[-1])]
        assert await post(engine.url, "/emulated/clear-cache", b"") == 200
        async with asyncio.timeout(20):
            while await f.blocks(first):
                await asyncio.sleep(0.01)
        rest = {f"decode-{i}" for i in range(3)} - {first}
        for name in rest:
            engine = f.engines[int(name[-1])]
            assert await post(engine.url, "/v1/completions", json.dumps({"prompt": prompt}).encode()) == 200
            await f.until_known(name, 4)
            assert (await f.ask(prompt)).headers["x-disagg-decode"] in rest


async def test_a_cached_prompt_counts_as_short() -> None:
    """The threshold is on tokens that have to be computed, and here these are known exactly."""
    async with fronted(1, local_prefill_tokens=40) as f:
        await f.ask(list(range(300, 400)))
        await f.until_known("decode-0", 6)
        affinity = f.rig.router._affinity
        held, cold = (
            Intake(Api.COMPLETIONS, {"prompt": msgspec.Raw(raw)}, stream=False, headers=())
            for raw in (json.dumps(list(range(300, 400))).encode(), json.dumps(list(range(100))).encode())
        )
        assert affinity.local_reason(await affinity.hints(held), Stage.DECODE) == "short-prompt"
        assert affinity.local_reason(await affinity.hints(cold), Stage.DECODE) is None


def test_engines_that_cannot_publish_are_refused_with_the_policys_place() -> None:
    """Before anything is served: the policy would silently be another one."""
    config = RouterConfig(("toy",), RouterSpec(decode_policy="kv-affinity"))
    with pytest.raises(ConfigError, match=r"router\.decode_policy.*KV events"):
        Router(config, PullDialect(), Fleet((Stage.DECODE,)))
