"""What has to be known of a prefill instance before its first request: asked once for each of its starts."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from disagg.engines.base import Dialect, Peer
from disagg.errors import HandoffError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.origin import Origin, Outgoing
from disagg.router.fleet import Member

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1024**2


class Introductions:
    """Asks what a dialect needs to know and keeps it on the member, which lives as long as its incarnation.

    Args:
        client: Connections to use.
        dialect: What is asked.
    """

    def __init__(self, client: Client, dialect: Dialect) -> None:
        self._client = client
        self._dialect = dialect
        self._asking: dict[Member, asyncio.Lock] = {}

    async def peer(self, member: Member) -> Peer:
        """What decode has to be told about `member`.

        Raises:
            UpstreamError: If it cannot be found out.
        """
        if self._dialect.query(member.peer) is None:
            return member.peer
        lock = self._asking.setdefault(member, asyncio.Lock())
        try:
            async with lock:
                url = self._dialect.query(member.peer)
                if url is not None:
                    member.peer = await self._ask(member, url)
        finally:
            if not lock.locked():
                self._asking.pop(member, None)
        return member.peer

    async def _ask(self, member: Member, url: str) -> Peer:
        parts = urlsplit(url)
        times = LegTimes(_TIMEOUT_S, _TIMEOUT_S, _TIMEOUT_S)
        origin = Origin.parse(f"{parts.scheme}://{parts.netloc}")
        response = await self._client.request(origin, Outgoing("GET", parts.path), times)
        try:
            answer = await response.read(_MAX_ANSWER_BYTES)
        finally:
            response.close()
        if response.status != 200:
            raise HandoffError(f"{url} answered with status {response.status}.")
        return self._dialect.learn(member.peer, answer)
