"""Emulated engines in this process, with real block accounting, behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from disagg.engines.base import Dialect, Peer
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import DialectName, EngineSettings, Pace, Role, SimplePace
from disagg.engines.sglang.dialect import BootstrapDialect
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.engines.vllm.dialect_lmcache import LMCacheDialect
from disagg.engines.vllm.dialect_mooncake import MooncakeDialect
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.engines.vllm.dialect_push import PushDialect
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

MODEL = "toy"
SETTINGS = EngineSettings(
    model=MODEL,
    served_model_names=(MODEL,),
    engine_id="",
    num_blocks=512,
    max_model_len=2048,
    lease_s=20.0,
    handshake_timeout_s=0.3,
)


DIALECTS: dict[DialectName, Dialect] = {
    "nixl-pull": PullDialect(),
    "nixl-push": PushDialect(),
    "mooncake": MooncakeDialect(),
    "lmcache": LMCacheDialect(),
    "sglang": BootstrapDialect(),
}


def peer_of(instance: Instance) -> Peer:
    """What other engines have to be told about one that is up."""
    where = instance.addresses
    return Peer(
        instance.settings.engine_id,
        "127.0.0.1",
        where.side_channel_port,
        where.side_channel_port,
        where.bootstrap_port,
    )


@dataclass
class ToyFleet:
    """What is up.

    Attributes:
        alone: An engine of the same model that hands nothing over: its words are the right ones.
    """

    router: Router
    prefill: list[Instance]
    decode: list[Instance]
    alone: Instance

    async def crash(self, instance: Instance) -> None:
        """End an engine as SIGKILL does; the router learns it from its connections."""
        await instance.stop()

    @staticmethod
    def held(instance: Instance) -> int:
        """Blocks that are not free."""
        pool = instance.core.engine.pool
        return pool.num_blocks - pool.free_blocks

    async def empty(self, instance: Instance, within_s: float = 30.0) -> None:
        """Wait until an engine holds no block for anybody."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self.held(instance):
            assert asyncio.get_running_loop().time() < deadline, f"{self.held(instance)} blocks are held"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def toy_fleet(
    prefill: int = 1,
    decode: int = 1,
    *,
    pace: Pace | None = None,
    dialect: DialectName = "nixl-pull",
    linger_s: float = 30.0,
    decode_with: Mapping[str, Any] | None = None,
    **spec: object,
) -> AsyncIterator[ToyFleet]:
    """So many engines per stage, ready, behind a router; `decode_with` are settings of the decode engines."""
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    anywhere = Addresses("127.0.0.1", 0, "127.0.0.1", 0)
    stages: dict[Stage, list[Instance]] = {Stage.PREFILL: [], Stage.DECODE: []}
    for stage, count, role in ((Stage.PREFILL, prefill, Role.PRODUCER), (Stage.DECODE, decode, Role.CONSUMER)):
        for n in range(count):
            name = f"{stage}-{n}"
            more = decode_with or {} if stage is Stage.DECODE else {}
            settings = replace(SETTINGS, role=role, engine_id=f"{name}-one", dialect=dialect, **more)
            if dialect == "nixl-push":
                # What nobody fetches stays for so long; long enough for legs to meet on a busy machine.
                settings = replace(settings, meeting_s=settings.meeting_s or 8.0)
            stages[stage].append(Instance(settings, pace or SimplePace(), anywhere))
    alone = Instance(replace(SETTINGS, engine_id="alone"), SimplePace(), anywhere)
    config = RouterConfig(
        (MODEL,),
        RouterSpec.model_validate({"load_interval_s": 0, **spec}),
        lease_s=SETTINGS.lease_s,
        linger_s=linger_s,
        probe=VllmAdapter().probe(),
    )
    router = Router(config, DIALECTS[dialect], fleet, tick_s=0.02)
    everybody = [alone, *stages[Stage.PREFILL], *stages[Stage.DECODE]]
    try:
        for instance in everybody:
            await instance.start()
        for stage, instances in stages.items():
            for n, instance in enumerate(instances):
                engine_id = instance.settings.engine_id
                fleet.add(f"{stage}-{n}", stage, instance.url, engine_id, peer_of(instance))
                fleet.mark(f"{stage}-{n}", engine_id, State.READY)
        await router.start("127.0.0.1", 0)
        yield ToyFleet(router, stages[Stage.PREFILL], stages[Stage.DECODE], alone)
    finally:
        await router.stop()
        for instance in everybody:
            await instance.stop()
