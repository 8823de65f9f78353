"""Emulated engines with real block accounting, a router in front of them, and a check that every book is closed.

The engines' words are a function of the KV that they actually read, so a missing, stale or foreign block shows as a
wrong word. An engine of the same model without any handoff says what is right.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.engines.emulated.faults import Faults
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import DialectName, EngineSettings, Pace, Role, SimplePace
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage
from tests.support.client import Ask, Ending, Result, ask
from tests.support.toy_fleet import DIALECTS, peer_of
from tests.support.wire import metric

MODEL = "toy"
SETTINGS = EngineSettings(
    model=MODEL,
    served_model_names=(MODEL,),
    engine_id="",
    num_blocks=512,
    max_model_len=2048,
    lease_s=2.0,
    handshake_timeout_s=0.3,
    prompt_tokens_details=True,
)
_ports = itertools.count(random.randrange(20_000, 31_000))


def low_port() -> int:
    """A free port below those that the system gives to outgoing connections, so that it can be bound again later."""
    for port in _ports:
        candidate = 20_000 + (port - 20_000) % 12_000
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", candidate))
            except OSError:
                continue
        return candidate
    raise AssertionError("unreachable")


@dataclass
class Node:
    """One engine and its place in the fleet.

    Attributes:
        up: Its process is there.
        starts: How often it was started.
    """

    name: str
    stage: Stage
    instance: Instance
    fleet: Fleet
    up: bool = False
    starts: int = 0

    @property
    def incarnation(self) -> str:
        return self.instance.settings.engine_id

    @property
    def free_blocks(self) -> int:
        return self.instance.core.engine.pool.free_blocks

    async def start(self, *, told: bool = True) -> None:
        """Start it, or start it again as another incarnation on the same ports.

        Args:
            told: The fleet gets to know, as from a launcher that has seen it become ready.
        """
        self.starts += 1
        self.instance.settings = replace(self.instance.settings, engine_id=f"{self.name}-run{self.starts}")
        await self.instance.start()
        self.up = True
        if told:
            self.announce()

    def announce(self) -> None:
        """Tell the fleet that the current incarnation is ready."""
        if self.fleet.get(self.name) is None:
            self.fleet.add(self.name, self.stage, self.instance.url, self.incarnation, peer_of(self.instance))
        else:
            self.fleet.update(self.name, self.incarnation, self.instance.url, peer_of(self.instance))
        self.fleet.mark(self.name, self.incarnation, State.READY)

    async def crash(self, *, told: bool = True) -> None:
        """End it as SIGKILL does: connections break, memory is gone."""
        if not self.up:
            return
        self.up = False
        await self.instance.stop()
        if told:
            self.fleet.mark(self.name, self.incarnation, State.DOWN)

    def freeze(self) -> None:
        """Stand still as after SIGSTOP: connections are accepted, nothing answers."""
        self.instance.core.driver.freeze()

    def thaw(self) -> None:
        if self.up:
            self.instance.core.driver.thaw()

    def fault(self, **fields: Any) -> None:
        """Make the next requests go wrong; without fields all is well again."""
        self.instance.core.faults.set((Faults(**fields),) if fields else ())

    async def drain(self) -> None:
        """No new requests; leave when those under way, and the KV held for others, are gone."""
        self.fleet.mark(self.name, self.incarnation, State.DRAINING)
        member = self.fleet.get(self.name)
        while self.up and member is not None and (member.in_flight or len(self.instance.core.engine.leases)):
            await asyncio.sleep(0.01)
        await self.crash()

    def open_books(self) -> list[str]:
        """What is not as it was at the start."""
        if not self.up:
            return []
        core = self.instance.core
        engine = core.engine
        counts = {
            "blocks held": engine.pool.num_blocks - engine.pool.free_blocks,
            "leases": len(engine.leases),
            "running": len(engine.running),
            "queued": engine.queued,
            "requests": len(core.exchanges),
        }
        return [f"{self.name}: {count} {what}" for what, count in counts.items() if count]


@dataclass
class Cluster:
    """Engines, fleet, router, and the results of all requests that were sent through `ask`."""

    nodes: dict[str, Node]
    fleet: Fleet
    router: Router
    oracle: Instance
    results: list[Result] = field(default_factory=list)

    @property
    def p(self) -> Node:
        return self.nodes["prefill-0"]

    @property
    def d(self) -> Node:
        return self.nodes["decode-0"]

    def stage(self, stage: Stage) -> list[Node]:
        return [n for n in self.nodes.values() if n.stage is stage]

    async def ask(self, what: Ask | None = None, **body: Any) -> Result:
        """Send a request to its end and remember the result."""
        result = await ask(self.router.port, what or Ask(body_of(**body)))
        self.results.append(result)
        return result

    async def right_words(self, what: Ask) -> Result:
        """What one engine that computes everything itself answers."""
        body = {k: v for k, v in what.body.items() if k not in {"stream", "stream_options"}}
        return await ask(self.oracle.addresses.port, Ask(body, what.path))

    async def page(self, path: str) -> bytes:
        """A page of the router."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode())
        raw = await reader.read()
        writer.close()
        return raw.partition(b"\r\n\r\n")[2]

    async def metric(self, name: str, **labels: str) -> float:
        return metric((await self.page("/metrics")).decode(), name, **labels)

    # What holds after every test.

    def open_books(self) -> list[str]:
        """What is not as it was at the start, on the engines and in the router."""
        router = self.router
        counts = {
            "client requests": router.in_flight,
            "answers": router.server.active,
            "upstream connections in use": router.client.busy_connections,
            **{f"legs on {m.name}": m.in_flight for m in self.fleet.members()},
        }
        left = [f"router: {count} {what}" for what, count in counts.items() if count]
        return left + [text for node in self.nodes.values() for text in node.open_books()]

    async def settled(self, within_s: float = 20.0) -> None:
        """Wait until every block, lease, leg and connection has come home; fail if one does not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while (left := self.open_books()) and loop.time() < deadline:
            await asyncio.sleep(0.01)
        assert left == [], left

    async def check(self) -> None:
        """All that has to hold whatever happened: see `settled`, `check_form`, `check_words` and `check_sums`."""
        await self.settled()
        check_form(self.results)
        await self.check_words()
        await self.check_sums()

    async def check_words(self) -> None:
        """Every answer has the words of an engine that computed all of it itself; a broken one begins with them."""
        for result in self.results:
            if result.ending not in {Ending.ANSWERED, Ending.BROKEN}:
                continue
            right = await self.right_words(result.ask)
            assert right.ending is Ending.ANSWERED, right
            for index, text in result.text.items():
                whole = right.text[index]
                if result.ending is Ending.ANSWERED:
                    assert (text, result.finish[index]) == (whole, right.finish[index]), result
                else:
                    assert whole.startswith(text), result
            if result.ending is Ending.ANSWERED and result.usage is not None and right.usage is not None:
                assert _bill(result.usage) == _bill(right.usage), result

    async def check_sums(self) -> None:
        """Every request that was sent is counted once, in the class in which its client saw it end."""
        page = (await self.page("/metrics")).decode()
        seen = Counter(r.ending for r in self.results)
        counted = {o: metric(page, "disagg_requests_total", outcome=o) for o in _OUTCOMES.values()}
        counted["client_left"] = metric(page, "disagg_requests_total", outcome="client_left")
        assert sum(counted.values()) == len(self.results), (counted, seen)
        for ending, outcome in _OUTCOMES.items():
            # A client that leaves may have been answered already without having read it.
            assert seen[ending] <= counted[outcome] <= seen[ending] + seen[Ending.LEFT], (counted, seen)
        for name in ("disagg_requests_in_flight", "disagg_legs_in_flight"):
            assert metric(page, name) == 0


_OUTCOMES = {Ending.ANSWERED: "ok", Ending.REFUSED: "refused", Ending.FAILED: "failed", Ending.BROKEN: "broken"}


def check_form(results: Iterable[Result]) -> None:
    """Every client saw one whole ending, and nothing after it."""
    wrong = [str(r) for r in results if r.problems or r.ending is Ending.CUT]
    assert wrong == [], wrong[:5]


def _bill(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


_fresh = itertools.count()


def fresh_prompt(words: int = 24) -> str:
    """A prompt that no engine has seen."""
    return f"number {next(_fresh)} " + " ".join(f"word{n}" for n in range(words))


def body_of(**fields: Any) -> dict[str, Any]:
    """A completion with a prompt of its own."""
    return {
        "model": MODEL,
        "prompt": fresh_prompt(),
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        **fields,
    }


def streamed(**fields: Any) -> Ask:
    """The same, streamed, with usage."""
    return Ask(body_of(stream=True, stream_options={"include_usage": True}, **fields))


@asynccontextmanager
async def cluster(
    prefill: int = 1,
    decode: int = 1,
    *,
    settings: EngineSettings = SETTINGS,
    pace: Pace | None = None,
    dialect: DialectName = "nixl-pull",
    checked: bool = True,
    **spec: Any,
) -> AsyncIterator[Cluster]:
    """So many engines per stage, ready, behind a router; every book is checked at the end.

    Args:
        prefill: Prefill engines.
        decode: Decode engines.
        settings: Of all engines; names and roles are set here.
        pace: How long their steps take; no time without it.
        dialect: How KV is handed over.
        checked: Check all invariants when the block ends without an error.
        spec: The topology's router section.
    """
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    nodes: dict[str, Node] = {}
    for stage, count, role in ((Stage.PREFILL, prefill, Role.PRODUCER), (Stage.DECODE, decode, Role.CONSUMER)):
        for number in range(count):
            name = f"{stage}-{number}"
            where = Addresses("127.0.0.1", low_port(), "127.0.0.1", low_port(), low_port())
            instance = Instance(
                replace(settings, role=role, engine_id=name, dialect=dialect), pace or SimplePace(), where
            )
            nodes[name] = Node(name, stage, instance, fleet)
    oracle = Instance(
        replace(settings, role=Role.NONE, engine_id="oracle"), SimplePace(), Addresses("127.0.0.1", 0, "127.0.0.1", 0)
    )
    config = RouterConfig((MODEL,), RouterSpec(**spec), lease_s=settings.lease_s, linger_s=2.0)
    router = Router(config, DIALECTS[dialect], fleet, tick_s=0.02)
    up = Cluster(nodes, fleet, router, oracle)
    try:
        await oracle.start()
        for node in nodes.values():
            await node.start()
        await router.start("127.0.0.1", 0)
        yield up
        if checked:
            await up.check()
    finally:
        await router.stop()
        for instance in [oracle, *(n.instance for n in nodes.values())]:
            await instance.stop()
