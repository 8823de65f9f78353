"""The engines' own queue lengths: read beside the requests, believed for a while, missing where all can see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import ReadinessProbe
from disagg.http.client import Client
from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.router.fleet import Fleet, State
from disagg.router.loads import Loads, count_requests, gauge_pattern
from disagg.topology.spec import Stage

PROBE = ReadinessProbe("/health", "/metrics", None, "vllm:num_requests_running", "vllm:num_requests_waiting")
GAUGES = (gauge_pattern(PROBE.running), gauge_pattern(PROBE.waiting))


def page(running: object, waiting: object) -> bytes:
    return (
        "# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="a}} b"}} {running}\n'
        f'vllm:num_requests_running{{engine="1",model_name="a}} b"}} 1.0\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 70.0\n'
        f"vllm:num_requests_waiting {waiting} 1700000000\n"
    ).encode()


def test_gauges_are_summed_over_ranks_and_not_confused_with_longer_names() -> None:
    """Labels may hold anything, a timestamp may follow."""
    assert count_requests(page("3.0", "2.0"), GAUGES) == 6


@pytest.mark.parametrize("text", [b"", b"# vllm:num_requests_running 3\n", b"vllm:num_requests_running 3\n"])
def test_a_page_without_both_gauges_is_no_load_of_zero(text: bytes) -> None:
    """An engine that does not tell is not idle."""
    assert count_requests(text, GAUGES) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_what_is_no_number_is_no_load(value: str) -> None:
    """Nor does it break the round."""
    assert count_requests(page(value, "0"), GAUGES) is None


@given(st.binary(max_size=300))
def test_any_page_is_read_without_an_error(text: bytes) -> None:
    """Engines are not trusted to send Prometheus' format."""
    count_requests(text + b"\nvllm:num_requests_running " + text, GAUGES)


class Engine:
    """Answers its metrics page as it is told."""

    def __init__(self) -> None:
        self.status = 200
        self.body = page(2, 3)
        self.asked = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.server = Server(self._handle)

    async def _handle(self, request: Request, respond: Responder) -> None:
        assert request.path == "/metrics"
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        respond.send(self.status, self.body)


class World:
    """A poller, its fleet with one instance, and the engine behind it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.now = 100.0
        self.client = Client()
        self.fleet = Fleet((Stage.DECODE,))
        self.member = self.fleet.add("decode-0", Stage.DECODE, f"http://127.0.0.1:{engine.server.port}", "one")
        self.fleet.mark("decode-0", "one", State.READY)
        self.loads = Loads(self.fleet, self.client, PROBE, 2.0, lambda: self.now)

    def metric(self, name: str, **labels: str) -> float:
        page = {s.name: s.family() for s in self.loads.series()}[name.removesuffix("_total")]
        wanted = {"stage": "decode", "engine": "decode-0", **labels}
        return sum(s.value for s in page.samples if s.name == name and s.labels == wanted)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    engine = Engine()
    await engine.server.start("127.0.0.1", 0)
    made = World(engine)
    try:
        yield made
    finally:
        await made.loads.stop()
        await made.client.close()
        await engine.server.stop()


async def test_our_own_requests_are_taken_out_of_what_the_engine_says() -> None:
    """Six requests, four of them ours: two are somebody else's, until the next poll."""
    async with world() as w:
        w.member.count(4)
        await w.loads.poll()
        assert w.fleet.snapshots(Stage.DECODE)[0].foreign == 2
        w.member.count(-3)
        assert w.fleet.snapshots(Stage.DECODE)[0]._asdict()["in_flight"] == 1
        assert w.metric("disagg_load_foreign_requests") == 2


async def test_a_request_that_ends_while_the_engine_answers_is_not_somebody_elses() -> None:
    """The page was written while we had six; that we have none when it arrives does not make them foreign."""
    async with world() as w:
        w.engine.gate = asyncio.Event()
        w.member.count(6)
        polling = asyncio.create_task(w.loads.poll())
        await w.engine.asked.wait()
        w.member.count(-6)
        w.engine.gate.set()
        await polling
        assert w.member.foreign == 0


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [(401, b"", "status-401"), (404, b"", "status-404"), (200, b"other 1\n", "no-such-metric")],
)
async def test_an_engine_that_does_not_tell_keeps_its_place_and_shows(status: int, body: bytes, why: str) -> None:
    """401 is not dead: the instance stays ready, the failure is counted, and its load gets old and then unknown."""
    async with world() as w:
        await w.loads.poll()
        assert w.member.foreign == 6
        w.engine.status, w.engine.body = status, body
        w.now += 9
        await w.loads.poll()
        assert w.member.foreign == 6
        assert w.metric("disagg_load_age_seconds") == 9
        w.now += 2
        await w.loads.poll()
        assert w.member.foreign is None
        assert w.member.ready
        assert w.metric("disagg_load_failures_total", why=why) == 2


async def test_an_engine_that_cannot_be_reached_is_counted() -> None:
    """And the round goes on."""
    async with world() as w:
        await w.engine.server.stop()
        await w.loads.poll()
        assert w.metric("disagg_load_failures_total", why="no-answer") == 1


async def test_only_ready_instances_are_asked_and_a_new_start_begins_anew() -> None:
    """An engine that starts has nothing to tell, and its predecessor's load is not its own."""
    async with world() as w:
        await w.loads.poll()
        new = w.fleet.update("decode-0", "two")
        w.engine.asked.clear()
        await w.loads.poll()
        assert not w.engine.asked.is_set()
        assert new.foreign is None
        assert w.metric("disagg_load_age_seconds") == 0


async def test_polling_goes_on_by_itself_and_ends() -> None:
    """Started, it asks; stopped in the middle of a question, nothing is left of it."""
    async with world() as w:
        w.engine.gate = asyncio.Event()
        w.loads.start()
        await w.engine.asked.wait()
        await w.loads.stop()
        assert w.client.busy_connections == 0
