"""Gives the engine time: runs its steps at the set pace, fetches remote KV, sends heartbeats, ends leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Protocol

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.faults import FaultBox
from disagg.engines.emulated.handoff import Fetched, RemoteKv
from disagg.engines.emulated.sequence import Sequence, State
from disagg.engines.emulated.settings import Pace
from disagg.engines.emulated.side_channel import TransferError
from disagg.engines.emulated.transfer import Puller

log = logging.getLogger("disagg.emulated")


class Clock(Protocol):
    """Time as the engine sees it."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let that much time pass; 0 lets other tasks run."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        """The event loop's time in seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class Publisher(Protocol):
    """Where events of the prefix cache go."""

    def publish(self, events: list[dict[str, object]]) -> None:
        """Send one batch."""
        ...

    def sources(self) -> dict[str, dict[str, object]]:
        """Where they come from, for those who want to read them."""
        ...


class Driver:
    """Runs one engine until it is stopped.

    Args:
        engine: What to run.
        pace: How long its steps take.
        clock: Time.
        puller: Connections to prefill engines; None without a KV connector.
        faults: What goes wrong with KV loads.

    Attributes:
        on_failure: Called when a bug has ended the engine's steps or its upkeep.
    """

    def __init__(
        self, engine: Engine, pace: Pace, clock: Clock, puller: Puller | None, faults: FaultBox | None = None
    ) -> None:
        self.engine = engine
        self.pace = pace
        self.clock = clock
        self.puller = puller
        self.publisher: Publisher | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._faults = faults or FaultBox((), clock.now)
        self._wake = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._held: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[Sequence, asyncio.Task[None]] = {}
        self._stuck: set[Sequence] = set()
        self._parked: dict[str, tuple[Sequence, asyncio.TimerHandle]] = {}
        engine.meetings.on_ask = self.asked
        self._main: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to run."""
        loop = asyncio.get_running_loop()
        self._main = [loop.create_task(self._steps()), loop.create_task(self._upkeep())]
        for task in self._main:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing is computed any more: whoever waits has to be told, instead of waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engine has failed", exc_info=error)
            self.on_failure()

    async def stop(self) -> None:
        """End at once; whatever runs is dropped."""
        for _, timer in self._parked.values():
            timer.cancel()
        tasks = [*self._main, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.puller is not None:
            await self.puller.close()

    # Requests.

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence."""
        if seq.remote is not None and self.puller is not None and not (seq.remote.lost or seq.remote.bootstrap):
            self.puller.connect(seq.remote)
        self.engine.now = self.clock.now()
        self.engine.add(seq)
        self._wake.set()

    def abort(self, seq: Sequence) -> None:
        """The client has left."""
        loading = seq.state is State.LOADING
        self.engine.abort(seq)
        if loading and (seq not in self._loads or seq in self._stuck):
            # Nothing writes into its blocks.
            task = self._loads.get(seq)
            if task is not None:
                task.cancel()
            self.engine.free(seq)
        elif loading and self._faults.frees_early():
            self.engine.pool.release(seq.blocks)
        self._wake.set()

    def release(self, remote: RemoteKv) -> None:
        """Tell another engine that its KV will not be read."""
        if self.puller is not None and not remote.lost:
            self._spawn(self._release(self.puller, remote))

    # Faults.

    @property
    def frozen(self) -> bool:
        """Whether the engine stands still."""
        return not self._thawed.is_set()

    def freeze(self) -> None:
        """Stand still: no steps, no answers on the side channel."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on."""
        self._thawed.set()
        held, self._held = self._held, []
        for action in held:
            action()
        self._wake.set()

    async def thawed(self) -> None:
        """Wait while the engine is frozen."""
        await self._thawed.wait()

    def gate(self, action: Callable[[], None]) -> None:
        """Run something now, or after a freeze."""
        if self.frozen:
            self._held.append(action)
        else:
            action()
            self._wake.set()

    def publish(self) -> None:
        """Send what has happened to the cache since the last time."""
        log_of = self.engine.pool.log
        if self.publisher is not None and log_of is not None and log_of.events:
            self.publisher.publish(log_of.take())

    # Tasks.

    async def _steps(self) -> None:
        engine, clock = self.engine, self.clock
        free_at = clock.now()
        while True:
            await self._thawed.wait()
            engine.now = clock.now()
            plan = engine.plan()
            self._start_loads()
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                free_at = clock.now()
                continue
            step_s = self.pace.step_s(plan.prefill_tokens, plan.decode_seqs, plan.context_tokens)
            # Steps follow each other without a gap while there is work, however late a timer fires.
            free_at = free_at + step_s if step_s else clock.now()
            await clock.sleep(max(0.0, free_at - clock.now()) if step_s else 0.0)
            await self._thawed.wait()
            engine.commit(plan, clock.now())
            if self.publisher is not None:
                self.publish()

    async def _upkeep(self) -> None:
        """Leases and heartbeats. The tick is a fraction of the lease, so that both are never late by much."""
        engine = self.engine
        tick = min(0.5, engine.settings.lease_s / 20)
        beat_every = engine.settings.lease_s / 6
        next_beat = self.clock.now() + beat_every
        while True:
            await self.clock.sleep(tick)
            if self.frozen:
                continue
            now = self.clock.now()
            if len(engine.leases) or len(engine.meetings):
                free = engine.pool.free_blocks
                engine.reap(now)
                if engine.pool.free_blocks != free:
                    self._wake.set()
            if self.puller is not None and now >= next_beat:
                next_beat = now + beat_every
                self.puller.beat(self._waiting_by_peer())

    def _waiting_by_peer(self) -> dict[str, list[str]]:
        peers: dict[str, list[str]] = {}
        for seq in (*self.engine.waiting, *self.engine.loading):
            if seq.remote is not None and not seq.remote.key:
                peers.setdefault(seq.remote.engine_id, []).append(seq.remote.request_id)
        return peers

    def _start_loads(self) -> None:
        engine = self.engine
        if engine.to_load:
            loads, engine.to_load = engine.to_load, []
            for seq in loads:
                remote = seq.remote
                if remote is not None and self.puller is not None and not remote.lost:
                    self._loads[seq] = self._spawn(self._load(self.puller, remote, seq))
        if engine.to_forward:
            forwards, engine.to_forward = engine.to_forward, []
            for seq in forwards:
                if self.puller is None:
                    engine.forwarded(seq)
                else:
                    self._spawn(self._forward(self.puller, seq))
        if engine.to_release:
            releases, engine.to_release = engine.to_release, []
            for remote in releases:
                self.release(remote)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, puller: Puller, remote: RemoteKv, seq: Sequence) -> None:
        engine = self.engine
        count = len(seq.blocks) - seq.computed // engine.settings.block_size
        fetched: Fetched | None = None
        try:
            fetched = await self._fetch(puller, remote, seq, count)
        except TransferError as error:
            log.warning("request %s: KV load failed: %s", seq.request_id, error)
        finally:
            self._loads.pop(seq, None)
            self._stuck.discard(seq)
        await self._thawed.wait()
        if seq.state is not State.FINISHED:
            self.engine.now = self.clock.now()
            engine.loaded(seq, fetched)
            self.publish()
        elif self._faults.frees_early():
            # The blocks were given back when the request was aborted; whoever has them now is written over.
            if fetched is not None:
                engine.pool.write_raw(seq.blocks[-count:] if count else [], fetched.data, fetched.block_size)
        else:
            engine.free(seq)
        self._wake.set()

    async def _fetch(self, puller: Puller, remote: RemoteKv, seq: Sequence, count: int) -> Fetched:
        """Read KV with the faults that are in force."""
        begun = self.clock.now()
        faults = self._faults.transfers()
        if remote.key or faults.transfer == "half":
            # It may never come; nothing writes into the blocks until it has, so an abort can free them at once.
            self._stuck.add(seq)
        delay = self.engine.settings.transfer_s + faults.transfer_s
        if faults.transfer_bytes_per_s:
            delay += count * self.engine.settings.block_size * 8 / faults.transfer_bytes_per_s
        if delay:
            await self.clock.sleep(delay)
        if faults.transfer == "lost":
            raise TransferError("the transfer was lost")
        if remote.key:
            wait_s = self.engine.settings.wait_s
            fetched = await puller.receive(remote, count, wait_s)
            return self._received(fetched, begun, corrupt=faults.transfer == "corrupt")
        if faults.transfer == "half":
            await puller.read(remote, count // 2, notify=False)
            await asyncio.get_running_loop().create_future()
        data, size = await puller.read(remote, count, notify=not faults.notice)
        if faults.notice == "duplicate":
            puller.notify(remote)
            puller.notify(remote)
        elif faults.notice == "late":
            self._spawn(self._notify_late(puller, remote, faults.notice_delay_s))
        return self._received(Fetched(data, size), begun, corrupt=faults.transfer == "corrupt")

    def _received(self, fetched: Fetched, begun: float, *, corrupt: bool) -> Fetched:
        stats = self.engine.stats
        stats.transfer.observe(self.clock.now() - begun)
        stats.transfer_bytes.observe(len(fetched.data))
        return replace(fetched, data=bytes(byte ^ 0x5A for byte in fetched.data)) if corrupt else fetched

    # Legs that leave together.

    def submit_when_asked(self, seq: Sequence, key: str) -> None:
        """Queue a sequence as soon as the decode leg is there, which has to be before the meeting's time ends."""
        if self.engine.meetings.asked(key):
            self.submit(seq)
            return
        timer = asyncio.get_running_loop().call_later(self.engine.settings.wait_s, self._not_asked, key)
        self._parked[key] = (seq, timer)

    def asked(self, key: str) -> None:
        """The decode leg of a request is there."""
        parked = self._parked.pop(key, None)
        if parked is not None:
            parked[1].cancel()
            if parked[0].state is not State.FINISHED:
                self.submit(parked[0])

    def _not_asked(self, key: str) -> None:
        seq, _ = self._parked.pop(key)
        if seq.state is not State.FINISHED:
            self.engine.give_up(seq)

    async def _forward(self, puller: Puller, seq: Sequence) -> None:
        """Send a finished sequence's KV into the buffer of the decode engine that it names."""
        engine, size = self.engine, self.engine.settings.block_size
        keys = seq.prompt_keys(size)[: len(seq.prompt) // size]
        host, port = seq.forward or ("", 0)
        try:
            await puller.send_ahead(host, port, (size, keys, engine.pool.read_raw(seq.blocks[: len(keys)])))
        except TransferError as error:
            log.warning("request %s: KV not sent ahead: %s", seq.request_id, error)
        await self._thawed.wait()
        engine.forwarded(seq)
        self._wake.set()

    async def _notify_late(self, puller: Puller, remote: RemoteKv, delay: float) -> None:
        await self.clock.sleep(delay)
        puller.notify(remote)

    async def _release(self, puller: Puller, remote: RemoteKv) -> None:
        try:
            await puller.release(remote)
        except TransferError as error:
            log.warning("prefill request %s keeps its KV until its lease ends: %s", remote.request_id, error)
