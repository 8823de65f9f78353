"""Following engines: from the first batch, without a gap, or anew."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from disagg.http.client import Client
from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.policy.kv_index import KvIndex, Prompt
from disagg.router.fleet import Fleet, State
from disagg.router.kv_events import KvFeed, Stream, reachable
from disagg.topology.spec import Stage

END = (-1).to_bytes(8, "big", signed=True)


def batch(value: int, time: float) -> bytes:
    """One block of one token, which follows nothing."""
    event = {"type": "BlockStored", "block_hashes": [value], "parent_block_hash": None, "token_ids": [value]}
    return msgspec.msgpack.encode([time, [{**event, "block_size": 1, "medium": "GPU"}], 0])


def held(index: KvIndex, limit: int = 30) -> list[int]:
    return [v for v in range(limit) if index.matched(Prompt(array("I", [v])))]


def test_batches_are_applied_in_order_and_once() -> None:
    """What replay and the live stream both bring counts once; a gap is told, and nothing behind it applied."""
    index = KvIndex(100)
    stream = Stream(index, "a", 0)
    assert stream.take(0, batch(0, 1.0))
    assert stream.take(1, batch(1, 2.0))
    assert stream.take(0, batch(0, 1.0))
    assert not stream.take(3, batch(3, 4.0))
    assert held(index) == [0, 1]
    assert stream.take(2, batch(2, 3.0))
    assert stream.take(3, batch(3, 4.0))
    assert held(index) == [0, 1, 2, 3]


def test_an_engine_that_counts_anew_is_learnt_anew() -> None:
    """Its numbers begin at 0 with later times: what it held before its restart is gone."""
    index = KvIndex(100)
    stream = Stream(index, "a", 0)
    for number in range(3):
        stream.take(number, batch(number, 1.0 + number))
    assert stream.take(0, batch(9, 50.0))
    assert held(index) == [9]
    assert not stream.take(2, batch(8, 52.0))


@pytest.mark.parametrize(
    ("endpoint", "host", "wanted"),
    [
        ("tcp://*:5557", "10.0.0.2", "tcp://10.0.0.2:5557"),
        ("tcp://0.0.0.0:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.2", "tcp://10.1.1.1:5557"),
        ("ipc:///run/x", "10.0.0.2", "ipc:///run/x"),
    ],
)
def test_an_address_that_was_bound_is_one_that_can_be_connected_to(endpoint: str, host: str, wanted: str) -> None:
    """A wildcard stands for the host that the engine is on."""
    assert reachable(endpoint, host) == wanted


class Publisher:
    """An engine that publishes what a test says, keeps some of it, and can lose messages on the way."""

    def __init__(self, keep: int = 1000) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.keep = keep
        self.sent: list[bytes] = []
        self.asked: list[int] = []
        self.silent = False
        self.server = Server(self._tell)
        self._task = asyncio.create_task(self._replay())

    async def _tell(self, request: Request, respond: Responder) -> None:
        sources: dict[str, Any] = {
            "0": {
                "endpoint": f"tcp://*:{self.port}",
                "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
                "topic": "kv",
                "hwm": 1,
            }
        }
        respond.send(200, msgspec.json.encode({} if self.silent else sources))

    async def publish(self, payload: bytes, *, lost: bool = False) -> None:
        number = len(self.sent)
        self.sent.append(payload)
        if not lost:
            await self.pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def _replay(self) -> None:
        while True:
            peer, _, start = await self.router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for number in range(max(first, len(self.sent) - self.keep), len(self.sent)):
                await self.router.send_multipart([peer, b"", b"kv", number.to_bytes(8, "big"), self.sent[number]])
            await self.router.send_multipart([peer, b"", b"", END, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self.context.destroy(linger=0)
        await self.server.stop()


class World:
    """One engine that publishes, and the feed that follows it."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.client = Client()
        self.index = KvIndex(1000)
        self.fleet = Fleet((Stage.PREFILL,))
        self.fleet.add("prefill-0", Stage.PREFILL, f"http://127.0.0.1:{publisher.server.port}", "one")
        self.feed = KvFeed(self.fleet, (Stage.PREFILL,), self.client, "/kv_event_sources", self.index)

    def metric(self, name: str) -> float:
        page = {s.name: s.family() for s in self.feed.series()}[name]
        return sum(s.value for s in page.samples if not s.name.endswith("_created"))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(keep: int = 1000) -> AsyncIterator[World]:
    publisher = Publisher(keep)
    await publisher.server.start("127.0.0.1", 0)
    made = World(publisher)
    made.feed.start()
    try:
        yield made
    finally:
        await made.feed.stop()
        await made.client.close()
        await publisher.close()


async def follow(w: World) -> None:
    """Until live batches arrive: who subscribes is not heard of at once."""
    w.fleet.mark("prefill-0", "one", State.READY)
    await w.until(lambda: bool(w.publisher.asked))
    while w.metric("disagg_kv_event_batches") < len(w.publisher.sent) or not w.publisher.sent:
        await w.publisher.publish(batch(0, float(len(w.publisher.sent))))
        await asyncio.sleep(0.02)


async def test_what_was_published_before_comes_by_replay_and_the_rest_live() -> None:
    """A router that starts late knows what the engine holds, without waiting for its next event."""
    async with world() as w:
        for value in (1, 2, 3):
            await w.publisher.publish(batch(value, float(value)))
        w.fleet.mark("prefill-0", "one", State.READY)
        await w.until(lambda: held(w.index) == [1, 2, 3])
        await follow(w)
        await w.publisher.publish(batch(7, 100.0))
        await w.until(lambda: 7 in held(w.index))
        assert w.metric("disagg_kv_publishers") == 1
        assert w.metric("disagg_kv_event_batches") == len(w.publisher.sent)


async def test_a_gap_is_filled_by_replay() -> None:
    """Lost on the way: asked for again, from the first missing one, and nothing is forgotten."""
    async with world() as w:
        await follow(w)
        first_lost = len(w.publisher.sent)
        await w.publisher.publish(batch(5, 100.0), lost=True)
        await w.publisher.publish(batch(6, 101.0), lost=True)
        await w.publisher.publish(batch(7, 102.0))
        await w.until(lambda: held(w.index) == [0, 5, 6, 7])
        assert w.publisher.asked[-1] == first_lost
        assert w.metric("disagg_kv_events_lost") == 0


async def test_what_cannot_be_replayed_makes_the_router_forget_that_engine() -> None:
    """A cache that is known in part only would send requests to blocks that are gone."""
    async with world(keep=1) as w:
        await follow(w)
        for value in (5, 6):
            await w.publisher.publish(batch(value, 100.0 + value), lost=True)
        await w.publisher.publish(batch(7, 110.0))
        await w.until(lambda: held(w.index) == [7])
        assert w.metric("disagg_kv_events_lost") == 1


async def test_a_batch_that_cannot_be_read_makes_the_router_forget_that_engine() -> None:
    """And it goes on with the next one."""
    async with world() as w:
        await follow(w)
        await w.publisher.publish(b"\xc1")
        await w.publisher.publish(batch(8, 120.0))
        await w.until(lambda: held(w.index) == [8])
        assert w.metric("disagg_kv_events_lost") == 1


async def test_an_incarnations_blocks_go_away_with_it() -> None:
    """Nothing is heard of it any more, and its successor is followed from its first batch."""
    async with world() as w:
        await follow(w)
        w.fleet.update("prefill-0", "two")
        assert len(w.index) == 0
        asked = len(w.publisher.asked)
        w.fleet.mark("prefill-0", "two", State.READY)
        await w.until(lambda: len(w.publisher.asked) > asked and held(w.index) == [0])


async def test_an_engine_that_does_not_publish_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """It is served by load alone; the log says what it lacks, the metrics page that nobody is followed."""
    async with world() as w:
        w.publisher.silent = True
        w.fleet.mark("prefill-0", "one", State.READY)
        await w.until(lambda: "--kv-events-config" in caplog.text)
        assert w.metric("disagg_kv_publishers") == 0
