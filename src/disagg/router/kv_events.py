"""Follows the KV events of the engines, so that the index of blocks is what their caches hold.

::

    engine ready -> where does it publish? -> replay from the first batch -> live batches
                                                    ^                            |
                                                    +------ a number is missing -+
                       what replay does not bring either: forget that publisher, go on from there

Needs pyzmq, so nothing imports this module unless a policy wants it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator

import msgspec
import zmq
import zmq.asyncio

from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Header
from disagg.http.origin import Outgoing
from disagg.policy.kv_index import KvIndex
from disagg.router.fleet import Fleet, Member
from disagg.router.kv_batches import read_batch
from disagg.router.series import ENGINE, Counter, Gauge, Labels, Series
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router")

_LOOK_S = 0.25
_ASK_AGAIN_S = 5.0
_REPLAY_S = 5.0
_TIMES = LegTimes(5.0, 5.0, 5.0)
_HIGH_WATER = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class Source(msgspec.Struct):
    """Where one data-parallel rank publishes, in the engine's words.

    Attributes:
        endpoint: Of the live stream.
        replay_endpoint: Of past batches; None if they cannot be had.
        topic: What to subscribe to.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


_sources = msgspec.json.Decoder(dict[str, Source])


class Stream:
    """The batches of one publisher, in order and without a gap.

    Args:
        index: Gets the events.
        name: The instance that publishes.
        rank: Its data-parallel rank.

    Attributes:
        next: Number of the batch that comes next.
    """

    def __init__(self, index: KvIndex, name: str, rank: int) -> None:
        self._index = index
        self._name = name
        self._rank = rank
        self._time = 0.0
        self.next = 0

    def take(self, number: int, payload: bytes) -> bool:
        """A batch has come.

        Returns:
            False if batches before it are missing: then it was not applied.

        Raises:
            ValueError: If it cannot be read.
        """
        batch = read_batch(payload)
        if number < self.next:
            if batch.time <= self._time:
                return True
            # Older number, newer time: the engine has begun anew.
            self.jump(0)
        if number > self.next:
            return False
        for event in batch.events:
            self._index.apply(self._name, self._rank, event)
        self.next = number + 1
        self._time = batch.time
        return True

    def jump(self, number: int) -> None:
        """What came before `number` is lost: nothing is known about this publisher's cache."""
        self._index.forget(self._name, self._rank)
        self.next = number
        self._time = 0.0


class KvFeed:
    """Follows every publisher of every ready engine of some stages.

    Args:
        fleet: Whose engines are followed.
        stages: Those whose policy looks at KV blocks.
        client: Connections to them, to ask where they publish.
        path: Where they are asked.
        index: Gets the events.

    Attributes:
        headers: Credentials that the engines want.
    """

    def __init__(self, fleet: Fleet, stages: Collection[Stage], client: Client, path: str, index: KvIndex) -> None:
        self._fleet = fleet
        self._stages = stages
        self._client = client
        self._path = path
        self._index = index
        self._following: dict[Member, asyncio.Task[None]] = {}
        self._ranks: dict[Member, int] = {}
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._batches = Counter("disagg_kv_event_batches", "Batches of KV events applied.", ("stage", ENGINE))
        self._lost = Counter(
            "disagg_kv_events_lost",
            "Times that what an engine holds had to be learnt anew, because batches were missing or unreadable.",
            ("stage", ENGINE),
        )
        self.headers: tuple[Header, ...] = ()
        fleet.on_gone(self._gone)

    def start(self) -> None:
        """Begin to follow."""
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Follow nobody any more."""
        tasks = [t for t in (self._task, *self._following.values()) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._following.clear()
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _look(self) -> None:
        while True:
            for member in [m for stage in self._stages for m in self._fleet.members(stage)]:
                if member.ready and member not in self._following:
                    self._following[member] = asyncio.create_task(self._follow(member))
            await asyncio.sleep(_LOOK_S)

    def _gone(self, member: Member) -> None:
        task = self._following.pop(member, None)
        if task is not None:
            task.cancel()
        for rank in range(self._ranks.pop(member, 0)):
            self._index.forget(member.name, rank)

    async def _follow(self, member: Member) -> None:
        sources = await self._ask(member)
        if not sources:
            log.warning(
                "%s does not tell where it publishes KV events (%s): its cache is taken as empty. "
                "vLLM needs --kv-events-config",
                member.name,
                self._path,
            )
        while not sources:
            await asyncio.sleep(_ASK_AGAIN_S)
            sources = await self._ask(member)
        self._ranks[member] = len(sources)
        await asyncio.gather(*(self._listen(member, rank, source) for rank, source in enumerate(sources)))

    async def _ask(self, member: Member) -> list[Source]:
        try:
            outgoing = Outgoing("GET", self._path, self.headers)
            response = await self._client.request(member.origin, outgoing, _TIMES)
            body = await response.read()
            return list(_sources.decode(body).values()) if response.status == 200 else []
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            # Asked again; until then `disagg_kv_publishers` shows that nobody is followed.
            return []

    async def _listen(self, member: Member, rank: int, source: Source) -> None:
        if self._context is None:
            return
        stream = Stream(self._index, member.name, rank)
        with self._context.socket(zmq.SUB) as sub:
            sub.setsockopt(zmq.LINGER, 0)
            sub.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            sub.setsockopt(zmq.IPV6, 1)
            sub.subscribe(source.topic)
            sub.connect(reachable(source.endpoint, member.origin.host))
            await self._replay(member, stream, source)
            while True:
                frames = await sub.recv_multipart()
                if len(frames) != 3:
                    continue
                number = int.from_bytes(frames[1], "big")
                if not self._take(member, stream, number, frames[2]):
                    await self._replay(member, stream, source)
                    self._take_or_jump(member, stream, number, frames[2])

    async def _replay(self, member: Member, stream: Stream, source: Source) -> None:
        """Ask for all batches from the one that comes next."""
        if source.replay_endpoint is None or self._context is None:
            return
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(reachable(source.replay_endpoint, member.origin.host))
            await dealer.send_multipart([b"", stream.next.to_bytes(8, "big")])
            while True:
                try:
                    async with asyncio.timeout(_REPLAY_S):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    return
                if len(frames) != 4 or frames[2] == _END:
                    return
                self._take_or_jump(member, stream, int.from_bytes(frames[2], "big"), frames[3])

    def _take_or_jump(self, member: Member, stream: Stream, number: int, payload: bytes) -> None:
        if not self._take(member, stream, number, payload):
            self._lost.values[member.stage, member.name] += 1
            stream.jump(number)
            self._take(member, stream, number, payload)

    def _take(self, member: Member, stream: Stream, number: int, payload: bytes) -> bool:
        try:
            taken = stream.take(number, payload)
        except ValueError as error:
            log.warning("KV events of %s: %s", member.name, error)
            self._lost.values[member.stage, member.name] += 1
            stream.jump(number + 1)
            return True
        self._batches.values[member.stage, member.name] += taken
        return taken

    def series(self) -> tuple[Series, ...]:
        """What there is to see of it."""
        labels = ("stage", ENGINE)

        def members() -> Iterator[Member]:
            return (m for stage in self._stages for m in self._fleet.members(stage))

        def publishers() -> Iterator[tuple[Labels, float]]:
            return (((m.stage, m.name), self._ranks.get(m, 0)) for m in members())

        def blocks() -> Iterator[tuple[Labels, float]]:
            return (((m.stage, m.name), self._index.held(m.name)) for m in members())

        return (
            Gauge("disagg_kv_publishers", "Publishers of KV events that are followed.", labels, publishers),
            Gauge("disagg_kv_index_blocks", "KV blocks that an engine is known to hold.", labels, blocks),
            self._batches,
            self._lost,
        )


def reachable(endpoint: str, host: str) -> str:
    """An address to connect to, where an engine tells the one that it has bound: a wildcard becomes its host."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(wildcard):
            shown = f"[{host}]" if ":" in host else host
            return f"tcp://{shown}:{endpoint.removeprefix(wildcard)}"
    return endpoint
