"""Faults that strike a cluster while requests run, from a plan that depends on a seed alone.

A plan counts in requests and not in seconds, so that a slow machine has the same faults at the same requests.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.topology.spec import Stage
from tests.support.client import Ask, Result
from tests.support.cluster import Cluster, Node, body_of

ENGINE_FAULTS: dict[str, dict[str, Any]] = {
    "answers-500": {"status": 500, "requests": 4},
    "answers-503": {"status": 503, "requests": 8},
    "closes": {"close_at_byte": 0, "requests": 4},
    "closes-inside": {"close_at_byte": 700, "requests": 6},
    "falls-silent": {"hang_at_byte": 500, "requests": 2},
    "is-slow": {"delay_s": 0.05, "requests": 20},
    "loses-handles": {"no_handle": True, "requests": 10},
    "slow-transfer": {"transfer_s": 0.1},
}
HARMLESS = frozenset({"drain", "is-slow", "slow-transfer"})
"""Faults that no request may fail of."""
KINDS = ("crash", "crash", "crash-unnoticed", "restart-unnoticed", "freeze", "drain", "drain", *ENGINE_FAULTS)
_FREEZE_S = 0.25


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of one engine, from the start of one request to the start of another."""

    begins: int
    ends: int
    node: str
    kind: str


def plan_strikes(rng: random.Random, nodes: Sequence[str], requests: int) -> list[Strike]:
    """Faults that leave at least half of each stage alone at any time, and end before the requests do."""
    free_at = dict.fromkeys(nodes, 0)
    strikes: list[Strike] = []
    at = 20
    while at < requests - 150:
        open_now = [s for s in strikes if s.ends > at]
        stage = rng.choice(("prefill", "decode"))
        mine = [n for n in nodes if n.startswith(stage)]
        hurt = sum(s.node in mine for s in open_now)
        idle = [n for n in mine if free_at[n] <= at]
        if idle and hurt < len(mine) // 2:
            strike = Strike(at, at + rng.randrange(20, 90), rng.choice(idle), rng.choice(KINDS))
            strikes.append(strike)
            free_at[strike.node] = strike.ends + 10
        at += rng.randrange(4, 20)
    return strikes


def plan_asks(rng: random.Random, requests: int) -> list[Ask]:
    """Requests of all sizes; some clients leave, before or inside their answer, and some read slowly."""
    asks = []
    for number in range(requests):
        words = rng.choice((4, 16, 40, 150))
        body = body_of(
            prompt=f"{number} " + " ".join(f"w{rng.randrange(50)}" for _ in range(words)),
            max_tokens=rng.choice((1, 2, 8, 20, 40)),
        )
        if rng.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.5}}
        if rng.random() < 0.1:
            body |= {"n": 2, "temperature": 0.7, "seed": number}
        mood = rng.random()
        asks.append(
            Ask(
                body,
                leave_after_s=rng.choice((0.0, 0.003, 0.02)) if mood < 0.06 else None,
                leave_after_bytes=rng.randrange(1, 1500) if 0.06 <= mood < 0.12 else None,
                pause_s=0.003 if 0.12 <= mood < 0.18 else 0.0,
            )
        )
    return asks


@dataclass
class Storm:
    """Carries a plan out while requests are sent.

    Attributes:
        windows: When each node was at fault, in loop time, and of what.
    """

    cluster: Cluster
    strikes: Sequence[Strike]
    windows: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)
    _number: int = -1
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)

    async def run(self, asks: Sequence[Ask], clients: int) -> None:
        """Send all requests, so many at once, and end every fault."""
        faults = [asyncio.create_task(self._strike(s)) for s in self.strikes]
        queue = iter(asks)

        async def client() -> None:
            for what in queue:
                self._advance(self._number + 1)
                await self.cluster.ask(what)

        await asyncio.gather(*(client() for _ in range(clients)))
        self._advance(len(asks) + 1_000_000)
        await asyncio.gather(*faults)

    def may_have_failed(self, result: Result) -> bool:
        """Whether one of the instances that an answer names was at fault while the request ran."""
        return any(
            begun <= result.ended and result.began <= ended and kind not in HARMLESS
            for name in result.instances
            for begun, ended, kind in self.windows.get(name, ())
        )

    def story(self, result: Result) -> str:
        """For a message: the request's times, its answer, and the faults of the instances that the answer names."""
        faults = {
            name: [(f"{b:.2f}", f"{e:.2f}", k) for b, e, k in self.windows.get(name, ())][-4:]
            for name in result.instances
        }
        return f"{result.began:.2f}..{result.ended:.2f} {result} {faults}"

    def _advance(self, number: int) -> None:
        self._number = number
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.pop(0)[1].set_result(None)

    async def _until(self, number: int) -> None:
        if number > self._number:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            bisect.insort(self._waiting, (number, turn), key=lambda entry: entry[0])
            await turn

    async def _strike(self, strike: Strike) -> None:
        await self._until(strike.begins)
        loop = asyncio.get_running_loop()
        windows = self.windows.setdefault(strike.node, [])
        windows.append((loop.time(), float("inf"), strike.kind))
        index = len(windows) - 1
        # A drain takes as long as its requests: what strikes the same engine next waits for its end.
        async with self._locks.setdefault(strike.node, asyncio.Lock()):
            await self._carry_out(self.cluster.nodes[strike.node], strike)
        windows[index] = (windows[index][0], loop.time(), strike.kind)

    async def _carry_out(self, node: Node, strike: Strike) -> None:
        match strike.kind:
            case "crash":
                await node.crash()
                await self._until(strike.ends)
                await node.start()
            case "crash-unnoticed":
                await node.crash(told=False)
                await self._until(strike.ends)
                await node.start()
            case "restart-unnoticed":
                await node.crash(told=False)
                await node.start(told=False)
                await self._until(strike.ends)
                node.announce()
            case "freeze":
                node.freeze()
                await asyncio.sleep(_FREEZE_S)
                node.thaw()
            case "drain":
                await node.drain()
                await self._until(strike.ends)
                await node.start()
            case kind:
                node.fault(**ENGINE_FAULTS[kind])
                await self._until(strike.ends)
                node.fault()


def stage_names(cluster: Cluster) -> list[str]:
    """Names of all engines, prefill first."""
    return [n.name for stage in (Stage.PREFILL, Stage.DECODE) for n in cluster.stage(stage)]
