"""The health of engines that somebody else started: asked again and again, on tasks of their own.

An engine is known by its start, not by its address. Another start is told by the start time of its process on the
metrics page; where that is missing, by a good answer after nothing listened; and by the data path, which sees
handles of another engine.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from disagg.engines.base import Peer
from disagg.errors import UpstreamError, UpstreamTimeoutError, UpstreamUnreachableError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Header
from disagg.http.origin import Origin, Outgoing
from disagg.policy.health import Condition, Finding, Health, HealthRules
from disagg.router.fleet import Fleet, Member, State
from disagg.topology.router_spec import Router as RouterSpec

log = logging.getLogger("disagg.router.probing")

_START = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)
_PAUSE_S = 0.2
_MAX_PAGE = 16 * 1024**2
_STATES = {
    Condition.NEW: State.STARTING,
    Condition.UP: State.READY,
    # No new requests, but those that it has may still end well.
    Condition.AWAY: State.DRAINING,
    Condition.GONE: State.DRAINING,
}


@dataclass(frozen=True, slots=True)
class Paths:
    """Where engines of one kind tell about themselves.

    Attributes:
        health: Answers 200 when the engine serves.
        metrics: Prometheus text.
    """

    health: str = "/health"
    metrics: str = "/metrics"


class Prober:
    """Looks after the members of a fleet that `watch` is called for.

    Args:
        fleet: Told what is found.
        client: Connections to use.
        spec: Reads the current settings, which may change.
        motion: Tells later whether an engine has gone on sending since.
        headers: The engines' credentials, the same as on requests.
        paths: Where to ask.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: Client,
        spec: Callable[[], RouterSpec],
        motion: Callable[[Origin], Callable[[], bool]],
        headers: tuple[Header, ...] = (),
        paths: Paths | None = None,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._spec = spec
        self._motion = motion
        self._headers = headers
        self._paths = paths or Paths()
        self._watches: dict[str, _Watch] = {}
        fleet.on_doubt(self._doubted)

    def watch(self, name: str, peer: Peer) -> None:
        """Begin to ask an engine of the fleet, at once.

        Args:
            name: Of the engine.
            peer: What other engines have to be told about each start of it.
        """
        self._watches[name] = watch = _Watch(name, peer)
        watch.task = asyncio.create_task(self._look_after(watch))

    def forget(self, name: str) -> None:
        """Stop asking an engine."""
        watch = self._watches.pop(name, None)
        if watch is not None and watch.task is not None:
            watch.task.cancel()

    async def stop(self) -> None:
        """Stop asking."""
        tasks = [w.task for w in self._watches.values() if w.task is not None]
        for name in tuple(self._watches):
            self.forget(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _doubted(self, member: Member, changed: bool) -> None:
        """The data path had trouble with an engine, or has seen another id of it: ask at once."""
        watch = self._watches.get(member.name)
        if watch is not None and self._fleet.is_current(member):
            watch.replaced |= changed
            watch.now.set()

    async def _look_after(self, watch: _Watch) -> None:
        while True:
            watch.now.clear()
            await self.probe(watch.name)
            # Doubts come with every failing request; the answer to one holds for a while.
            await asyncio.sleep(min(_PAUSE_S, self._spec().health_interval_s))
            try:
                async with asyncio.timeout(self._spec().health_interval_s):
                    await watch.now.wait()
            except TimeoutError:
                continue

    async def probe(self, name: str) -> None:
        """Ask one engine once, and tell the fleet what follows."""
        watch = self._watches[name]
        member = self._fleet.get(name)
        if member is None:
            return
        finding, why = await self._ask(member)
        if finding is Finding.GOOD:
            await self._identify(watch, member)
        elif finding is Finding.REFUSED:
            watch.replaced = True
        if self._fleet.get(name) is None or self._watches.get(name) is not watch:
            return  # it was removed meanwhile
        if watch.health.feed(finding, self._rules()):
            log.warning("%s is %s%s", name, watch.health.condition, f": {why}" if why else "")
        state = _STATES[watch.health.condition]
        if state is State.DRAINING and finding is Finding.REFUSED and not member.in_flight:
            # Nobody listens, and nothing is open that could still end well.
            state = State.DOWN
        self._fleet.mark(name, watch.incarnation, state)

    async def _ask(self, member: Member) -> tuple[Finding, str]:
        timeout_s = self._spec().health_timeout_s
        moved = self._motion(member.origin)
        try:
            status, _ = await self._get(member, self._paths.health, timeout_s)
        except UpstreamTimeoutError as error:
            return (Finding.BUSY if moved() else Finding.SILENT), error.message
        except UpstreamUnreachableError as error:
            # Somebody who listens and breaks off is unwell; only a refusal says that nobody is there.
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            return (Finding.REFUSED if refused else Finding.SILENT), error.message
        except UpstreamError as error:
            return Finding.BAD, error.message
        if status in {401, 403}:
            return Finding.GOOD, f"{self._paths.health} wants another key ({status})"
        return (Finding.GOOD, "") if status == 200 else (Finding.BAD, f"{self._paths.health} answers {status}")

    async def _identify(self, watch: _Watch, member: Member) -> None:
        """Notice that an engine is another process than the last time."""
        started = await self._started(member)
        if not watch.incarnation:
            self._renew(watch, started)
        elif started and watch.started and started != watch.started:
            log.warning("%s was started again", watch.name)
            self._renew(watch, started)
        elif watch.replaced and not (started and watch.started):
            log.warning("%s is taken for a new process", watch.name)
            self._renew(watch, started)
        elif started:
            watch.started = started
        watch.replaced = False

    def _renew(self, watch: _Watch, started: str) -> None:
        watch.starts += 1
        watch.started = started
        watch.incarnation = f"{watch.name}#{watch.starts}"
        if self._fleet.get(watch.name) is not None:
            self._fleet.update(watch.name, watch.incarnation, peer=watch.peer)
        watch.health.restarted()

    async def _started(self, member: Member) -> str:
        """When its process was started, as it says itself; empty if it does not."""
        try:
            status, page = await self._get(member, self._paths.metrics, self._spec().health_timeout_s)
        except UpstreamError:
            return ""  # its health was good a moment ago; who it is can be asked the next time
        found = _START.search(page) if status == 200 else None
        return found[1].decode("ascii") if found is not None else ""

    async def _get(self, member: Member, path: str, timeout_s: float) -> tuple[int, bytes]:
        times = LegTimes(timeout_s, timeout_s, timeout_s)
        response = await self._client.request(member.origin, Outgoing("GET", path, self._headers), times)
        try:
            return response.status, await response.read(_MAX_PAGE)
        finally:
            response.close()

    def _rules(self) -> HealthRules:
        spec = self._spec()
        return HealthRules(spec.health_failures, spec.health_successes)


class _Watch:
    """What is remembered about one engine between two questions."""

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.peer = peer
        self.health = Health()
        self.incarnation = ""
        self.started = ""
        self.starts = 0
        self.replaced = False
        self.now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
