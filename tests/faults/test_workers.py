"""Several router processes on one port: one deployment to clients, whatever happens to a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from disagg.engines.base import Peer
from disagg.errors import PreparationError
from disagg.http.server import Server
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.workers import WorkerPool
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage
from tests.support.mock_engine import FakeDialect, MockEngine, decoded, prefilled
from tests.support.rig import MODEL, Call, Reply, _head
from tests.support.wire import metric


class Pool:
    """Two workers before one prefill and one decode engine."""

    def __init__(self, fleet: Fleet, engines: list[MockEngine], workers: WorkerPool) -> None:
        self.fleet = fleet
        self.p, self.d = engines
        self.workers = workers

    async def get(self, path: str) -> Reply:
        call = await Call.open(self.workers.port)
        call.send(_head("GET", path, {"host": "test"}))
        try:
            return await call.reply()
        finally:
            await call.close()

    async def call(self) -> Call:
        body = b'{"model":"%b","prompt":"x"}' % MODEL.encode()
        call = await Call.open(self.workers.port)
        lines = {"host": "test", "content-type": "application/json", "content-length": str(len(body))}
        call.send(_head("POST", "/v1/completions", lines) + body)
        return call

    async def ask(self) -> Reply:
        call = await self.call()
        try:
            return await call.reply()
        finally:
            await call.close()


@asynccontextmanager
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    # The workers have to find the mock engines' dialect.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    engines = [MockEngine(prefilled, "engine-p"), MockEngine(decoded, "engine-d")]
    for stage, engine in zip((Stage.PREFILL, Stage.DECODE), engines, strict=True):
        await engine.start()
        fleet.add(f"{stage}-0", stage, engine.url, f"inc-{stage}", Peer(engine.engine_id))
        fleet.mark(f"{stage}-0", f"inc-{stage}", State.READY)
    config = RouterConfig((MODEL,), RouterSpec(workers=2), access_log=False)
    workers = WorkerPool(config, FakeDialect(), fleet, 2, tick_s=0.01)
    try:
        await workers.start("127.0.0.1", 0)
        yield Pool(fleet, engines, workers)
    finally:
        await workers.stop()
        for engine in engines:
            await engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_pages_show_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever worker answers, /metrics and /health tell of every request on the port."""
    async with pool(monkeypatch) as p:
        assert [(await p.ask()).status for _ in range(12)] == [200] * 12
        for _ in range(4):
            page = (await p.get("/metrics")).body.decode()
            assert metric(page, "disagg_requests_total") == 12
            assert metric(page, "disagg_stage_ready", stage="prefill") == 1
            health = (await p.get("/health")).json()
            assert [m["in_flight"] for m in health["instances"]] == [0, 0]


async def test_a_dead_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed is started again; the other one serves meanwhile, and the books of the dead close."""
    async with pool(monkeypatch) as p:
        before = p.workers.pids
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(p.workers.pids) == 2 and before[0] not in p.workers.pids)
        assert before[1] in p.workers.pids
        for _ in range(12):
            try:
                assert (await p.ask()).status == 200
            except (ConnectionError, asyncio.IncompleteReadError):
                continue  # it was waiting at the dead process's door
        # The other one tells what it has open four times a second.
        await until(lambda: p.workers.in_flight == 0)


async def test_changes_of_the_fleet_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes down, and comes back as another incarnation, does so for every worker."""
    async with pool(monkeypatch) as p:
        p.fleet.mark("decode-0", "inc-decode", State.DOWN)
        async with asyncio.timeout(30):
            while {(await p.get("/health")).status for _ in range(6)} != {503}:
                pass
        assert {(await p.ask()).status for _ in range(6)} == {503}
        p.fleet.update("decode-0", "again", p.d.url, Peer("engine-d"))
        p.fleet.mark("decode-0", "again", State.READY)
        async with asyncio.timeout(30):
            while {(await p.get("/health")).status for _ in range(6)} != {200}:
                pass
        assert {(await p.ask()).status for _ in range(6)} == {200}


async def test_drain_reaches_all_workers_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way on any worker ends well, the parent's books show it, and nobody new is let in."""
    async with pool(monkeypatch) as p:
        go = asyncio.Event()

        async def slow(engine: MockEngine, request: object, respond: object) -> None:
            await go.wait()
            await decoded(engine, request, respond)  # type: ignore[arg-type]

        p.d.default = slow
        calls = [await p.call() for _ in range(6)]
        member = p.fleet.members(Stage.DECODE)[0]
        await until(lambda: p.workers.in_flight == 6 and member.in_flight == 6)
        draining = asyncio.create_task(p.workers.drain(20))
        await until(lambda: p.workers.in_flight == 6)
        assert not draining.done()
        go.set()
        assert [(await call.reply()).status for call in calls] == [200] * 6
        assert await draining
        with pytest.raises(OSError):
            await Call.open(p.workers.port)
        for call in calls:
            await call.close()
        await until(lambda: member.in_flight == 0)


async def test_a_taken_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing a port is for the workers among themselves: one that another program uses is refused at once."""

    async def nothing(request: object, respond: object) -> None: ...

    other = Server(nothing)
    await other.start("127.0.0.1", 0, shared=True)
    workers = WorkerPool(RouterConfig((MODEL,)), FakeDialect(), Fleet((Stage.DECODE,)), 2)
    try:
        with pytest.raises(PreparationError, match=str(other.port)):
            await workers.start("127.0.0.1", other.port)
    finally:
        await workers.stop()
        await other.stop()
