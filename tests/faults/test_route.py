"""A router in front of engines that somebody else started, stops, freezes and starts again."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.engines.emulated.instance import Instance
from disagg.engines.emulated.settings import SimplePace
from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.router.fleet import State
from disagg.serve.routing import Routing, Source
from disagg.topology.fleet_file import LoadedFleet, load_fleet
from disagg.topology.yaml_source import read_yaml, read_yaml_file
from tests.support.mock_engine import Behaviour, MockEngine, decoded, gated
from tests.support.rig import Call, Reply
from tests.unit.engines_emulated.running import ANYWHERE, SETTINGS, pair

FAST = "health_interval_s: 0.02, health_timeout_s: 0.1, health_failures: 2, health_successes: 2"


class Engine(MockEngine):
    """A mock engine with a health page that a test scripts, and a process start time.

    Attributes:
        health: Status of the next health checks; 0 never answers.
        started: What it says about its process.
        checks: Health checks that it has seen.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.health = 200
        self.started: float | None = 1.0
        self.checks: list[Request] = []

    async def _answer(self, engine: MockEngine, request: Request, respond: Responder) -> None:
        if request.path == "/health":
            self.checks.append(request)
            if self.health == 0:
                await asyncio.sleep(3600)
            respond.send(self.health, b"")
        elif request.path == "/metrics":
            known = self.started is not None
            respond.send(200, f"process_start_time_seconds {self.started}\n".encode() if known else b"")
        else:
            await decoded(engine, request, respond)


class Desk:
    """A running `disagg route` and what it says."""

    def __init__(self, routing: Routing, said: io.StringIO) -> None:
        self.routing = routing
        self.said = said

    def state(self, name: str = "decode-0") -> State | None:
        member = self.routing.fleet.get(name)
        return member.shown_state if member is not None else None

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came true; said: {self.said.getvalue()}")

    async def ask(self, prompt: str = "x", **extra: Any) -> Reply:
        call = await self.call(prompt, **extra)
        try:
            return await call.reply()
        finally:
            await call.close()

    async def call(self, prompt: str = "x", **extra: Any) -> Call:
        import json

        data = json.dumps({"model": "m", "prompt": prompt, **extra}).encode()
        call = await Call.open(self.routing.router.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {len(data)}\r\n"
        call.send(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        return call

    async def get(self, path: str) -> Reply:
        call = await Call.open(self.routing.router.port)
        call.send(f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        try:
            return await call.reply()
        finally:
            await call.close()


@asynccontextmanager
async def desk(text: str, path: Path | None = None) -> AsyncIterator[Desk]:
    """`disagg route` with this file, on a port of its own."""
    if path is not None:
        path.write_text(text)

    def load() -> LoadedFleet:
        return load_fleet(read_yaml_file(str(path)) if path is not None else read_yaml(text, name="r.yaml"))

    said = io.StringIO()
    file = load().file
    # Port 0 takes a free one, which the file format does not have.
    router = file.router.model_copy(update={"admin_port": 0} if file.router.admin_port else {})
    file = file.model_copy(update={"port": 0, "router": router})
    routing = Routing(file, Source(str(path), load, Console(file=said, width=200)))
    await routing.start()
    try:
        yield Desk(routing, said)
    finally:
        await routing.stop()


@asynccontextmanager
async def engines(count: int = 1) -> AsyncIterator[list[Engine]]:
    started = [Engine() for _ in range(count)]
    for engine in started:
        await engine.start()
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()


def decode_only(*up: Engine | str, router: str = FAST) -> str:
    urls = ", ".join(e if isinstance(e, str) else e.url for e in up)
    return f"model: m\ndecode: [{urls}]\nrouter: {{{router}}}\n"


def dead_url() -> str:
    """A URL where nobody listens."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


async def test_it_starts_with_some_engines_down_and_is_ready_with_one_per_stage() -> None:
    """One dead engine neither stops the start nor gets requests; with none, the router says so and lives."""
    async with engines() as (engine,), desk(decode_only(dead_url(), engine)) as d:
        await d.until(lambda: d.state("decode-1") is State.READY)
        health = await d.get("/health")
        assert health.status == 200
        assert [i["state"] for i in health.json()["instances"]] != ["ready", "ready"]
        assert (await d.ask()).status == 200
    async with desk(decode_only(dead_url())) as d:
        health = await d.get("/health")
        assert (health.status, health.json()["missing"]) == (503, ["decode"])
        assert (await d.ask()).status == 503


async def test_a_silent_engine_gets_no_requests_and_keeps_what_it_has() -> None:
    """After enough missing answers; its stream goes on, and it comes back after enough good answers."""
    async with engines(2) as (one, two), desk(decode_only(one, two)) as d:
        await d.until(lambda: d.state("decode-0") is d.state("decode-1") is State.READY)
        gate = asyncio.Event()
        one.script.clear()
        member = d.routing.fleet.get("decode-1")
        assert member is not None
        member.park(True)
        behaviour = gated(gate, [b'data: {"n":1}\n\n'], [b"data: [DONE]\n\n"])

        async def stream_or_health(engine: MockEngine, request: Request, respond: Responder) -> None:
            await (one._answer if request.path in ("/health", "/metrics") else behaviour)(engine, request, respond)

        one.default = stream_or_health
        call = await d.call(stream=True)
        assert (await call.head()).status == 200
        await call.chunk()
        member.park(False)
        one.health = 0
        await d.until(lambda: d.state("decode-0") is State.DRAINING)
        assert (await d.ask()).headers["x-disagg-decode"] == "decode-1"
        gate.set()
        assert b"[DONE]" in await call.chunk()
        await call.close()
        one.health = 200
        await d.until(lambda: d.state("decode-0") is State.READY)


def streaming(stop: asyncio.Event) -> Behaviour:
    """Go on sending events until told to stop; health and metrics are answered as the test scripts them."""

    async def steady(engine: MockEngine, request: Request, respond: Responder) -> None:
        if request.path in ("/health", "/metrics"):
            assert isinstance(engine, Engine)
            await engine._answer(engine, request, respond)
            return
        respond.start(200, ((b"content-type", b"text/event-stream"),))
        while not stop.is_set():
            respond.write(b'data: {"n":1}\n\n')
            await asyncio.sleep(0.02)
        respond.finish(b"data: [DONE]\n\n")

    return steady


async def test_busy_is_not_dead() -> None:
    """An engine that has no time for health checks but goes on streaming stays in."""
    async with engines() as (engine,), desk(decode_only(engine)) as d:
        await d.until(lambda: d.state() is State.READY)
        stop = asyncio.Event()

        engine.default = streaming(stop)
        call = await d.call(stream=True)
        await call.head()
        engine.health = 0
        before = len(engine.checks)
        await d.until(lambda: len(engine.checks) >= before + 6)
        assert d.state() is State.READY
        stop.set()
        # With nothing to do, silence is silence.
        await d.until(lambda: d.state() is State.DRAINING)
        await call.close()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_health_page_that_wants_another_key_is_not_dead(status: int) -> None:
    """Whoever answers 401 is there; the requests' own answers will show what is wrong."""
    async with engines() as (engine,):
        engine.health = status
        async with desk(decode_only(engine)) as d:
            await d.until(lambda: d.state() is State.READY)


async def test_health_and_metrics_are_asked_with_the_engines_key(tmp_path: Path) -> None:
    """One key for everything that goes to an engine."""
    key = tmp_path / "key"
    key.write_text("for-engines\n")
    async with engines() as (engine,), desk(decode_only(engine, router=f"{FAST}, engine_api_key_file: {key}")) as d:
        await d.until(lambda: d.state() is State.READY)
        asked = [r for r in engine.seen if r.path in ("/health", "/metrics")]
        assert {r.path for r in asked} == {"/health", "/metrics"}
        assert {r.header(b"authorization") for r in asked} == {b"Bearer for-engines"}


async def test_a_restarted_engine_on_the_same_port_is_a_new_incarnation() -> None:
    """Told by the start time of its process, even if no question met a closed port."""
    async with engines() as (engine,), desk(decode_only(engine)) as d:
        await d.until(lambda: d.state() is State.READY)
        first = d.routing.fleet.get("decode-0")
        assert first is not None
        engine.started = 2.0
        await d.until(lambda: d.routing.fleet.get("decode-0") is not first and d.state() is State.READY)
        second = d.routing.fleet.get("decode-0")
        assert second is not None
        assert (first.state, second.incarnation != first.incarnation) == (State.DOWN, True)
        assert (await d.ask()).status == 200


async def test_an_engine_without_a_start_time_is_new_after_a_closed_port() -> None:
    """The next good answer after a refusal is taken for another process."""
    async with engines() as (engine,):
        engine.started = None
        async with desk(decode_only(engine)) as d:
            await d.until(lambda: d.state() is State.READY)
            first = d.routing.fleet.get("decode-0")
            port = int(engine.url.rpartition(":")[2])
            await engine.stop()
            await d.until(lambda: d.state() is State.DOWN)
            reborn = Engine()
            reborn.started = None
            await reborn.start(port)
            await d.until(lambda: d.state() is State.READY)
            assert d.routing.fleet.get("decode-0") is not first
            await reborn.stop()


async def test_the_file_is_followed_and_streams_of_a_removed_engine_run_to_their_end(tmp_path: Path) -> None:
    """A new engine comes in, a removed one gets nothing new and leaves when it is idle."""
    path = tmp_path / "r.yaml"
    async with engines(2) as (one, two), desk(decode_only(one), path) as d:
        await d.until(lambda: d.state("decode-0") is State.READY)
        gate = asyncio.Event()
        behaviour = gated(gate, [b'data: {"n":1}\n\n'], [b"data: [DONE]\n\n"])

        async def stream_or_health(engine: MockEngine, request: Request, respond: Responder) -> None:
            await (one._answer if request.path in ("/health", "/metrics") else behaviour)(engine, request, respond)

        one.default = stream_or_health
        call = await d.call(stream=True)
        await call.head()
        await call.chunk()
        path.write_text(decode_only(two, router=f"{FAST}, retries: 0, max_body_bytes: 5000"))
        d.routing.reload()
        await d.until(lambda: d.state("decode-1") is State.READY)
        assert d.state("decode-0") is State.DRAINING
        assert (await d.ask()).headers["x-disagg-decode"] == "decode-1"
        assert d.routing.router.config.spec.retries == 0
        assert "router.max_body_bytes changes with a restart" in d.said.getvalue()
        gate.set()
        assert b"[DONE]" in await call.chunk()
        await call.close()
        await d.until(lambda: d.state("decode-0") is None)


async def test_a_broken_file_changes_nothing_and_is_reported(tmp_path: Path) -> None:
    """A slip while editing must not take a deployment down."""
    path = tmp_path / "r.yaml"
    async with engines() as (engine,), desk(decode_only(engine), path) as d:
        await d.until(lambda: d.state() is State.READY)
        path.write_text("model: m\ndecode: [nonsense]\n")
        d.routing.reload()
        assert "was not taken over" in d.said.getvalue()
        assert "decode.0.url: expected a URL" in d.said.getvalue()
        path.write_text(f"model: m\ncolocated: {engine.url}\n")
        d.routing.reload()
        assert "need a restart" in d.said.getvalue()
        assert (await d.ask()).status == 200


async def test_it_routes_over_emulated_engines_and_notices_a_restart_between_two_requests() -> None:
    """End to end with KV that really moves: the same words before and after prefill is another incarnation."""
    prefill, decode = pair(replace(SETTINGS, served_model_names=("m",)), replace(SETTINGS, served_model_names=("m",)))
    instances = [Instance(s, SimplePace(), ANYWHERE) for s in (prefill, decode)]
    for instance in instances:
        await instance.start()
    try:
        p, q = (i.url for i in instances)
        async with desk(f"model: m\nprefill: {p}\ndecode: {q}\nrouter: {{{FAST}}}\n") as d:
            await d.until(lambda: d.state("prefill-0") is d.state("decode-0") is State.READY)
            first = await d.ask("tell me of the sea and the ships", max_tokens=12)
            assert (first.status, first.headers["x-disagg-path"]) == (200, "disaggregated")
            before = d.routing.fleet.get("prefill-0")
            await instances[0].restart()
            await d.ask("tell me of the sea and the ships", max_tokens=12)
            await d.until(lambda: d.routing.fleet.get("prefill-0") is not before)
            await d.until(lambda: d.state("prefill-0") is State.READY)
            again = await d.ask("tell me of the sea and the ships", max_tokens=12)
            assert (again.status, again.headers["x-disagg-path"]) == (200, "disaggregated")
            assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
    finally:
        for instance in instances:
            await instance.stop()


async def test_a_file_that_is_gone_or_is_no_text_is_said_and_looked_after(tmp_path: Path) -> None:
    """Deleted, replaced by a folder, not UTF-8: the engines stay, and the next good version is taken over."""
    path = tmp_path / "r.yaml"
    async with engines(2) as (one, two), desk(decode_only(one), path) as d:
        await d.until(lambda: d.state("decode-0") is State.READY)
        watching = asyncio.create_task(d.routing._watch())
        path.unlink()
        await d.until(lambda: "cannot be looked at; everything stays as it is" in d.said.getvalue())
        path.mkdir()
        await d.until(lambda: d.said.getvalue().count("was not taken over") == 1)
        path.rmdir()
        path.write_bytes(b"model: \xff\xfe\n")
        await d.until(lambda: d.said.getvalue().count("was not taken over") == 2)
        assert (await d.ask()).status == 200
        path.write_text(decode_only(one, two))
        await d.until(lambda: d.state("decode-1") is State.READY)
        assert not watching.done()
        watching.cancel()
