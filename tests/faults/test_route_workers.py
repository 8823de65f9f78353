"""`disagg route` with several router processes: one fleet, one set of settings, one admin API for all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.router.fleet import State
from disagg.router.workers import WorkerPool
from tests.faults.test_admin import KEY, call
from tests.faults.test_route import Desk, dead_url, decode_only, desk, engines, streaming
from tests.support.launch_fakes import free_port
from tests.support.mock_engine import MockEngine, gated
from tests.support.wire import metric

ROUTER = "workers: 2, health_interval_s: 0.1, health_timeout_s: 1, health_failures: 2, health_successes: 1"
ADMIN = f"{ROUTER}, admin_port: 9"


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin API's key, where the settings ask for that API."""
    monkeypatch.setenv("DISAGG_ADMIN_KEY", KEY)


def pool_of(d: Desk) -> WorkerPool:
    """The router processes."""
    assert isinstance(d.routing.router, WorkerPool)
    return d.routing.router


def admin_port(d: Desk) -> int:
    """Where the admin API listens."""
    assert d.routing.admin is not None
    return d.routing.admin.port


async def ready(d: Desk, *names: str) -> None:
    """Wait until these instances are ready, and every process has heard of it."""
    await d.until(lambda: all(d.state(name) is State.READY for name in names))
    async with asyncio.timeout(30):
        # Which process answers is up to the kernel: eight good answers in a row are enough.
        while {(await d.get("/health")).status for _ in range(8)} != {200}:
            await asyncio.sleep(0.02)


async def served_by(d: Desk, requests: int = 12) -> set[str]:
    """Which decode engines answer; every one of the requests must be."""
    replies = await asyncio.gather(*(d.ask() for _ in range(requests)))
    assert {r.status for r in replies} == {200}
    return {r.headers["x-disagg-decode"] for r in replies}


async def test_a_drained_instance_gets_nothing_from_any_process_and_comes_back() -> None:
    """What the admin API says holds for all processes, whichever the kernel gives a connection to."""
    async with engines(2) as (one, two), desk(decode_only(one, two, router=ADMIN)) as d:
        await ready(d, "decode-0", "decode-1")
        port = admin_port(d)
        assert (await call(port, "POST", "/admin/instances/decode-0/drain")).status == 200

        async def drained() -> bool:
            shown = (await call(port, "GET", "/admin/instances")).json()["instances"]
            return bool(shown[0]["drained"])

        async with asyncio.timeout(30):
            while not await drained():
                await asyncio.sleep(0.02)
        # Every process has told that it knows.
        assert await served_by(d) == {"decode-1"}
        assert (await call(port, "POST", "/admin/instances/decode-0/undrain")).status == 200
        async with asyncio.timeout(30):
            while await served_by(d) != {"decode-0", "decode-1"}:
                await asyncio.sleep(0.02)


async def test_an_instance_leaves_only_when_the_requests_of_every_process_are_over() -> None:
    """Removing it while a process that has not reported yet streams from it would break that stream."""
    async with engines(2) as (one, two), desk(decode_only(one, two, router=ADMIN)) as d:
        await ready(d, "decode-0", "decode-1")
        gate = asyncio.Event()
        behaviour = gated(gate, [b'data: {"n":1}\n\n'], [b"data: [DONE]\n\n"])

        async def stream_or_health(engine: MockEngine, request: Request, respond: Responder) -> None:
            await (one._answer if request.path in ("/health", "/metrics") else behaviour)(engine, request, respond)

        one.default = two.default = stream_or_health
        streams = [await d.call(stream=True) for _ in range(4)]
        heads = [await s.head() for s in streams]
        for name in ("decode-0", "decode-1"):
            if any(h.headers["x-disagg-decode"] == name for h in heads):
                # At once: the processes have not told yet what they have open.
                assert (await call(admin_port(d), "DELETE", f"/admin/instances/{name}")).status == 202
        gate.set()
        for stream in streams:
            rest = b""
            while b"[DONE]" not in rest:
                rest += await stream.chunk()
            await stream.close()


async def test_policy_settings_and_loudness_reach_every_process_and_those_started_later() -> None:
    """A process that died is replaced by one with the settings of now, not of the start."""
    async with engines() as (engine,), desk(decode_only(engine, router=ADMIN)) as d:
        await ready(d, "decode-0")
        port, pool = admin_port(d), pool_of(d)
        body = {"stage": "decode", "name": "round-robin"}
        assert (await call(port, "PUT", "/admin/policy", body)).status == 200
        assert (await call(port, "PUT", "/admin/log-level", {"level": "error"})).status == 200
        shown = (await call(port, "GET", "/admin/config")).json()
        assert shown["router"]["decode_policy"] == "round-robin"
        refused = await call(port, "PUT", "/admin/policy", {"stage": "decode", "name": "kv-affinity"})
        assert refused.status == 400
        assert "KV events" in json.dumps(refused.json())
        assert (await call(port, "GET", "/admin/config")).json()["router"]["decode_policy"] == "round-robin"
        dead = pool.pids[0]
        os.kill(dead, signal.SIGKILL)
        await d.until(lambda: len(pool.pids) == 2 and dead not in pool.pids)
        assert pool.setup().config.spec.decode_policy == "round-robin"
        assert await served_by(d) == {"decode-0"}


async def test_an_engine_that_streams_to_some_process_is_busy_and_not_dead() -> None:
    """Who looks after health has no part in requests: the processes tell it that something still comes."""
    async with engines() as (engine,), desk(decode_only(engine, router=ROUTER)) as d:
        await ready(d, "decode-0")
        stop = asyncio.Event()

        engine.default = streaming(stop)
        stream = await d.call(stream=True)
        await stream.head()
        engine.health = 0
        before = len(engine.checks)
        await d.until(lambda: len(engine.checks) >= before + 4)
        assert d.state() is State.READY
        stop.set()
        # With nothing to do, silence is silence.
        await d.until(lambda: d.state() is State.DRAINING)
        await stream.close()


async def test_a_failing_leg_in_any_process_makes_the_engine_be_asked_at_once() -> None:
    """The doubt of a process reaches whoever looks after health, long before the next question is due."""
    slow = "workers: 2, health_interval_s: 600, health_timeout_s: 5, health_failures: 1, health_successes: 1"
    async with engines(2) as (one, two), desk(decode_only(one, two, router=slow)) as d:
        await ready(d, "decode-0", "decode-1")
        await one.stop()
        async with asyncio.timeout(30):
            while d.state("decode-0") is State.READY:
                assert (await d.ask()).status == 200


async def test_the_page_of_metrics_counts_the_requests_of_all_processes() -> None:
    """Whichever process answers."""
    async with engines() as (engine,), desk(decode_only(engine, router=ROUTER)) as d:
        await ready(d, "decode-0")
        await served_by(d, 10)
        page = (await d.get("/metrics")).body.decode()
        assert metric(page, "disagg_requests_total") == 10


async def started(port: int) -> tuple[asyncio.subprocess.Process, list[int]]:
    """`disagg route` with two router processes, as a user starts it, and the processes that it has started."""
    words = ["--model", "m", "--decode", dead_url(), "--port", str(port), "--router-workers", "2"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "disagg", "route", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
    assert b"Routing m over 1 decode" in line, line + await process.stdout.read()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, [int(pid) for pid in children]


async def gone(pids: list[int]) -> None:
    """Wait until none of these processes runs."""
    async with asyncio.timeout(30):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_the_command_ends_with_all_its_processes(how: signal.Signals) -> None:
    """In order after a signal; and when the first process is killed, nobody is left on the port."""
    process, workers = await started(free_port())
    assert len(workers) == 2
    process.send_signal(how)
    async with asyncio.timeout(60):
        code = await process.wait()
    assert code == (0 if how is signal.SIGTERM else -how)
    await gone(workers)
