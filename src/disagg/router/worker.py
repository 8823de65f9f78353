"""One of several router processes on a port: `python -m disagg.router.worker DESCRIPTOR`, started by `workers`.

It has a router and a fleet of its own. The fleet follows the parent's; load counts, affinities, breakers and retry
budgets are this process's own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import replace
from itertools import count

import uvloop

from disagg.errors import DisaggError
from disagg.http.upstream import Progress, UpstreamConnection
from disagg.router.app import Router
from disagg.router.fleet import Fleet, Member
from disagg.router.garbage import look_less_often
from disagg.router.worker_link import (
    Change,
    Doubt,
    Drain,
    Drained,
    FleetNews,
    Link,
    Listening,
    MemberNews,
    Message,
    Numbers,
    Open,
    OpenLegs,
    Refused,
    Setup,
    Stop,
    Whole,
)

_REPORT_S = 0.25
# Whether engines go on sending is looked at less often: it takes a look at each open connection.
_TICKS_PER_LOOK = 4
# How long a page waits for the other workers before it shows this one's numbers alone.
_WHOLE_S = 2.0


class FleetFollower:
    """Makes a fleet the same as the parent's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, MemberNews] = {}
        self.serial = 0

    def follow(self, news: FleetNews) -> None:
        """Apply what has changed since the last news."""
        fleet = self._fleet
        self.serial = news.serial
        names = {member.name for member in news.members}
        for name in self._known.keys() - names:
            fleet.remove(name)
            del self._known[name]
        for new in news.members:
            old = self._known.get(new.name)
            if new == old:
                continue
            if old is None:
                fleet.add(new.name, new.stage, new.url, new.incarnation, new.peer)
            elif (old.incarnation, old.url, old.peer) != (new.incarnation, new.url, new.peer):
                fleet.update(new.name, new.incarnation, new.url, new.peer)
            fleet.mark(new.name, new.incarnation, new.state)
            member = fleet.get(new.name)
            if member is not None and member.parked is not new.parked:
                member.park(new.parked)
            self._known[new.name] = new


class Worker:
    """The process: a router that listens when told to, and reports."""

    def __init__(self, link: Link, setup: Setup) -> None:
        self._link = link
        self._setup = setup
        fleet = Fleet(setup.needed)
        self._follower = FleetFollower(fleet)
        self._follower.follow(setup.fleet)
        self._router = Router(setup.config, setup.dialect, fleet, tick_s=setup.tick_s)
        self._router.whole = self
        # Whoever looks after the engines' health is in the parent.
        fleet.on_doubt(self._doubt)
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Whole]] = {}

    async def run(self) -> None:
        """Serve until the parent says otherwise, or is gone."""
        try:
            await self._router.start(self._setup.host, self._setup.port, shared=True)
        except DisaggError as error:
            self._link.send(Refused(str(error)))
            return
        self._link.send(Listening())
        reporting = asyncio.create_task(self._report())
        draining: asyncio.Task[None] | None = None
        try:
            while not isinstance(message := await self._link.receive(), Stop | None):
                if isinstance(message, Drain):
                    draining = asyncio.create_task(self._drain(message.timeout_s))
                else:
                    self._hear(message)
        finally:
            for task in (reporting, draining):
                if task is not None:
                    task.cancel()
            await self._router.stop()

    def _hear(self, message: Message) -> None:
        match message:
            case FleetNews():
                self._follower.follow(message)
            case Change():
                self._router.change(message.spec)
                self._router.set_log_level(message.log_level)
            case Numbers():
                self._link.send(Numbers(message.number, self._router.metrics.render(), self._open()))
            case Whole():
                asked = self._asked.pop(message.number, None)
                if asked is not None and not asked.done():
                    asked.set_result(message)

    async def _drain(self, timeout_s: float) -> None:
        self._link.send(Drained(await self._router.drain(timeout_s)))

    async def _report(self) -> None:
        told = Open()
        marks: dict[UpstreamConnection, Progress] = {}
        for tick in count():
            now = self._open()
            if tick % _TICKS_PER_LOOK == 0:
                client = self._router.client
                now = replace(now, moved=frozenset(o.url for o in client.moved_origins(marks)))
                marks = client.marks()
            if now.moved or now != told:
                self._link.send(now)
                told = now
            await asyncio.sleep(_REPORT_S)

    def _open(self) -> Open:
        legs = {
            (m.name, m.incarnation): OpenLegs(m.in_flight, m.pinned, m.pinned_until_s)
            for m in self._router.fleet.members()
        }
        return Open(self._router.in_flight, legs, self._follower.serial)

    def _doubt(self, member: Member, changed: bool) -> None:
        self._link.send(Doubt(member.name, member.incarnation, changed))

    # What the router's pages show of all workers.

    async def page(self) -> bytes:
        """The metrics page of all workers; this one's if the others do not answer."""
        whole = await self._ask()
        return self._router.metrics.render() if whole is None or whole.page is None else whole.page

    async def in_flight(self) -> dict[str, int]:
        """Open legs by instance, over all workers."""
        whole = await self._ask()
        legs = (self._open() if whole is None else whole.open).legs
        found: dict[str, int] = {}
        for (name, _), counts in legs.items():
            found[name] = found.get(name, 0) + counts.in_flight
        return found

    async def _ask(self) -> Whole | None:
        number = next(self._numbers)
        asked: asyncio.Future[Whole] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked
        self._link.send(Whole(number))
        try:
            async with asyncio.timeout(_WHOLE_S):
                return await asked
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)


async def _main(descriptor: int) -> None:
    # A terminal sends its signals to the whole group: when to stop is the parent's decision.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    look_less_often()
    link = Link(*await asyncio.open_connection(sock=socket.socket(fileno=descriptor)))
    setup = await link.receive()
    if isinstance(setup, Setup):
        logging.basicConfig(level=setup.log_level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        await Worker(link, setup).run()
    link.close()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))
