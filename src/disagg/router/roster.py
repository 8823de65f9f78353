"""Engines that somebody else started, as they come and go while the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from disagg.engines.base import Peer
from disagg.errors import BadRequestError
from disagg.router.fleet import Fleet, Member
from disagg.router.probing import Prober
from disagg.topology.fleet_file import Endpoint, FleetFile, name_endpoints
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router.roster")

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Entry:
    stage: Stage
    endpoint: Endpoint


class Roster:
    """Puts engines into the fleet, and takes them out when nobody needs them any more.

    Args:
        fleet: Of the router.
        prober: Looks after their health.
        now: Monotonic seconds.
        settled: Whether a member's counts are all that there will be once it takes no more requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        now: Callable[[], float],
        settled: Callable[[Member], bool] = lambda _: True,
    ) -> None:
        self._fleet = fleet
        self._prober = prober
        self._now = now
        self._settled = settled
        self._entries: dict[str, _Entry] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def add(self, stage: Stage, endpoint: Endpoint, name: str | None = None) -> str:
        """Take an engine in; it gets requests once it has answered.

        Args:
            stage: What it serves.
            endpoint: Where it is.
            name: Its name; the endpoint's own, or a free one if there is none.

        Returns:
            Its name.

        Raises:
            BadRequestError: If its name or URL is taken, or the router has no use for its stage.
        """
        if not self._fleet.needs(stage):
            raise BadRequestError(f"This router has no {stage} stage; that takes a restart.", param="stage")
        same = next((n for n, e in self._entries.items() if e.endpoint.url == endpoint.url), None)
        if same is not None:
            raise BadRequestError(f"{endpoint.url} is {same} already.", param="url")
        name = name or name_endpoints(stage, [endpoint], {}, [m.name for m in self._fleet.members()])[endpoint.url]
        if self._fleet.get(name) is not None:
            raise BadRequestError(f"There is an instance {name} already.", param="name")
        peer = Peer(
            engine_id=endpoint.engine_id or "",
            host=endpoint.side_channel_host or endpoint.host,
            side_channel_port=endpoint.side_channel_port or 0,
            alloc_port=endpoint.alloc_port or 0,
            bootstrap_port=endpoint.bootstrap_port or 0,
            tensor=endpoint.tensor,
        )
        self._fleet.add(name, stage, endpoint.url, incarnation="", peer=peer)
        self._entries[name] = _Entry(stage, endpoint)
        self._prober.watch(name, peer)
        return name

    def remove(self, name: str) -> None:
        """Forget an engine at once; what it has open ends.

        Raises:
            KeyError: If it is unknown.
        """
        leaving = self._leaving.pop(name, None)
        if leaving is not None and leaving is not asyncio.current_task():
            leaving.cancel()
        del self._entries[name]
        self._prober.forget(name)
        self._fleet.remove(name)

    def retire(self, name: str, limit_s: float) -> None:
        """Give an engine no more requests, and forget it once it has none and no KV that decode could fetch.

        Args:
            name: Of a known engine.
            limit_s: After so many seconds it is forgotten all the same.

        Raises:
            KeyError: If it is unknown.
        """
        member = self._fleet.get(name)
        if member is None or name not in self._entries:
            raise KeyError(name)
        member.park(True)
        if name not in self._leaving:
            self._leaving[name] = asyncio.create_task(self._see_off(name, limit_s))

    def keep(self, name: str) -> None:
        """Let an engine that is on its way out stay, and give it requests again. Nothing happens to any other."""
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            leaving.cancel()
            self._park(name, False)

    async def _see_off(self, name: str, limit_s: float) -> None:
        ends_s = self._now() + limit_s
        while self._now() < ends_s:
            member = self._fleet.get(name)
            if member is None or (self._settled(member) and member.idle(self._now())):
                break
            await asyncio.sleep(_LOOK_S)
        log.warning("%s has left", name)
        self.remove(name)

    def follow(self, file: FleetFile) -> list[str]:
        """Make the fleet what a file says: new engines come in, those that are gone from it leave when they can.

        Returns:
            What has changed, in words.
        """
        changes = []
        wanted: dict[str, _Entry] = {}
        for stage in file.stages():
            given = file.endpoints(stage)
            known = {e.endpoint.url: n for n, e in self._entries.items() if e.stage is stage}
            names = name_endpoints(stage, given, known, [*self._entries, *wanted])
            wanted |= {names[e.url]: _Entry(stage, e) for e in given}
        for name, entry in tuple(self._entries.items()):
            if wanted.get(name) == entry:
                if name in self._leaving:
                    # It was on its way out, and the file has it again.
                    self.keep(name)
                    changes.append(f"{name} stays")
            elif name in wanted:
                self.remove(name)  # it is somewhere else, or something else, now
            elif name not in self._leaving:
                self.retire(name, file.router.request_timeout_s)
                changes.append(f"{name} leaves")
        for name, entry in wanted.items():
            if name not in self._entries:
                self.add(entry.stage, entry.endpoint, name)
                changes.append(f"{name} is {entry.endpoint.url}")
        return changes

    def _park(self, name: str, parked: bool) -> None:
        member = self._fleet.get(name)
        if member is not None:
            member.park(parked)

    async def stop(self) -> None:
        """Wait for nobody any more."""
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
