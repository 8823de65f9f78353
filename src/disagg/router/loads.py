"""How busy the engines say they are: asked once in a while, beside the requests and never in front of one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from math import isfinite

from disagg.engines.base import ReadinessProbe
from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Header
from disagg.http.origin import Outgoing
from disagg.policy.load import foreign_requests
from disagg.router.fleet import Fleet, Member
from disagg.router.series import ENGINE, Counter, Gauge, Labels, Series

log = logging.getLogger("disagg.router")

_OLD_AFTER = 5
"""Intervals without an answer after which what an engine said last is no longer believed."""


class Loads:
    """Reads the engines' own queue lengths, all of them at the same time.

    An engine that does not answer keeps its requests and its place: it may be busy, and whether it is alive is not
    decided here. Its age on the metrics page grows, and soon only what this router knows itself counts.

    Args:
        fleet: Whose members are asked, while they can be given requests.
        client: Connections to them.
        probe: Where an engine tells, and under which names.
        interval_s: Seconds between two rounds.
        now: Monotonic seconds.

    Attributes:
        headers: Credentials that the engines want.
    """

    def __init__(
        self, fleet: Fleet, client: Client, probe: ReadinessProbe, interval_s: float, now: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._probe = probe
        self._interval_s = interval_s
        self._now = now
        self._gauges = (gauge_pattern(probe.running), gauge_pattern(probe.waiting))
        # When each was asked first, or answered last.
        self._heard: dict[Member, float] = {}
        self._failing: dict[Member, str] = {}
        self._failures = Counter(
            "disagg_load_failures", "Questions for the load without a usable answer.", ("stage", ENGINE, "why")
        )
        self.headers: tuple[Header, ...] = ()
        self._task: asyncio.Task[None] | None = None
        fleet.on_gone(self._gone)

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def poll(self) -> None:
        """Ask every ready member once."""
        members = [m for m in self._fleet.members() if m.ready]
        await asyncio.gather(*(self._ask(m) for m in members))

    async def _run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    async def _ask(self, member: Member) -> None:
        self._heard.setdefault(member, self._now())
        own = member.in_flight
        limit_s = max(1.0, self._interval_s)
        outgoing = Outgoing("GET", self._probe.metrics_path, self.headers)
        try:
            response = await self._client.request(member.origin, outgoing, LegTimes(limit_s, limit_s, limit_s))
            body = await response.read()
        except UpstreamError:
            self._failed(member, "no-answer")
            return
        if response.status != 200:
            self._failed(member, f"status-{response.status}")
            return
        requests = count_requests(body, self._gauges)
        if requests is None:
            self._failed(member, "no-such-metric")
            return
        self._failing.pop(member, None)
        if self._fleet.is_current(member):
            self._heard[member] = self._now()
            # The greater one: a request that came or went meanwhile must not look like somebody else's.
            member.set_foreign(foreign_requests(requests, max(own, member.in_flight)))

    def _failed(self, member: Member, why: str) -> None:
        self._failures.values[member.stage, member.name, why] += 1
        if self._failing.get(member) != why:
            self._failing[member] = why
            log.warning("the load of %s cannot be read: %s of %s", member.name, why, self._probe.metrics_path)
        if self._now() - self._heard[member] > _OLD_AFTER * self._interval_s:
            member.set_foreign(None)

    def _gone(self, member: Member) -> None:
        self._heard.pop(member, None)
        self._failing.pop(member, None)

    def series(self) -> tuple[Series, ...]:
        """What there is to see of it."""
        labels = ("stage", ENGINE)

        def ages() -> Iterator[tuple[Labels, float]]:
            now = self._now()
            return (((m.stage, m.name), now - heard) for m, heard in self._heard.items())

        def foreign() -> Iterator[tuple[Labels, float]]:
            return (((m.stage, m.name), m.foreign) for m in self._heard if m.foreign is not None)

        return (
            Gauge("disagg_load_age_seconds", "Since an engine told its load, or was first asked.", labels, ages),
            Gauge("disagg_load_foreign_requests", "Requests of others that it had at that time.", labels, foreign),
            self._failures,
        )


def gauge_pattern(name: str) -> re.Pattern[bytes]:
    """Finds the values of a metric in Prometheus' text format, whatever its labels."""
    return re.compile(rb"^%b(?:\{.*\})?[ \t]+(\S+)" % re.escape(name.encode()), re.MULTILINE)


def count_requests(page: bytes, gauges: Iterable[re.Pattern[bytes]]) -> int | None:
    """Sum gauges over their labels: an engine with several data-parallel ranks has one sample for each.

    Returns:
        None if one of them is not on the page, or is no number.
    """
    total = 0.0
    for gauge in gauges:
        values = gauge.findall(page)
        try:
            total += sum(map(float, values))
        except ValueError:
            return None
        if not values:
            return None
    return round(total) if isfinite(total) else None
