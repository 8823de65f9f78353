"""What engines tell about their prefix caches: asked when a request first depends on it, once for each start."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from disagg.engines.base import ReadinessProbe
from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Header
from disagg.http.origin import Outgoing
from disagg.router.fleet import Fleet, Member

_TIMEOUT_S = 1.0
_AGAIN_S = 5.0
"""Seconds for which an engine that did not tell is not asked again."""
_MAX_PAGE = 16 * 1024**2
_BLOCK_SIZE = re.compile(rb'[{,]block_size="(\d+)"')
_OFF = re.compile(rb'[{,]enable_prefix_caching="False"')


class PrefixCache(NamedTuple):
    """The prefix cache of an engine, as far as it is known.

    Attributes:
        block_size: Tokens that are found together or not at all; 0 if that is not known.
        off: The engine keeps nothing for later requests.
    """

    block_size: int = 0
    off: bool = False


UNKNOWN = PrefixCache()


class PrefixCaches:
    """Asks engines, and keeps what they say as long as their incarnation lives.

    Args:
        client: Connections to them.
        fleet: Tells who is gone.
        probe: Where they tell it, and under which name; None if nobody knows.
        now: Monotonic seconds.

    Attributes:
        headers: Credentials that the engines want.
    """

    def __init__(self, client: Client, fleet: Fleet, probe: ReadinessProbe | None, now: Callable[[], float]) -> None:
        self._client = client
        self._fleet = fleet
        self._metric = probe.cache_info if probe is not None else None
        self._path = probe.metrics_path if probe is not None else ""
        self._now = now
        self._known: dict[Member, tuple[PrefixCache, float]] = {}
        self._asking: dict[Member, asyncio.Lock] = {}
        self.headers: tuple[Header, ...] = ()
        fleet.on_gone(self._gone)

    async def of(self, member: Member) -> PrefixCache:
        """The prefix cache of `member`; what it does not tell within a second is unknown for a while."""
        if self._metric is None:
            return UNKNOWN
        known = self._known.get(member)
        if known is None or self._now() >= known[1]:
            lock = self._asking.setdefault(member, asyncio.Lock())
            try:
                async with lock:
                    known = self._known.get(member)
                    if known is None or self._now() >= known[1]:
                        known = await self._ask(member, self._metric)
                        if self._fleet.is_current(member):
                            self._known[member] = known
            finally:
                if not lock.locked():
                    self._asking.pop(member, None)
        return known[0]

    async def _ask(self, member: Member, metric: str) -> tuple[PrefixCache, float]:
        outgoing = Outgoing("GET", self._path, self.headers)
        again = (UNKNOWN, self._now() + _AGAIN_S)
        try:
            response = await self._client.request(
                member.origin, outgoing, LegTimes(_TIMEOUT_S, _TIMEOUT_S, _TIMEOUT_S)
            )
            try:
                page = await response.read(_MAX_PAGE)
            finally:
                response.close()
        except UpstreamError:
            return again  # whether it is alive is not decided here
        cache = read_cache_info(page, metric) if response.status == 200 else None
        return (cache, inf) if cache is not None else again

    def _gone(self, member: Member) -> None:
        self._known.pop(member, None)


def read_cache_info(page: bytes, metric: str) -> PrefixCache | None:
    """Find the description of the prefix cache on a metrics page.

    An engine with several data-parallel ranks has a sample for each: the largest block counts, and a cache that is
    off on one of them is off.

    Args:
        page: In Prometheus' text format.
        metric: Whose labels describe it.

    Returns:
        None if the metric is not on the page.
    """
    samples = re.findall(rb"^%b(\{.*\})[ \t]" % re.escape(metric.encode()), page, re.MULTILINE)
    if not samples:
        return None
    sizes = [int(size[1]) for sample in samples if (size := _BLOCK_SIZE.search(sample)) is not None]
    return PrefixCache(max(sizes, default=0), any(_OFF.search(sample) is not None for sample in samples))
