"""KV that prefill holds and nobody will fetch: it is let go at once, where an engine can be told, else by its lease.

============================================================  ================================================
the decode leg ...                                            the KV is
============================================================  ================================================
was never sent, or its answer was an error                    released: nobody reads it
broke, or was not answered in time                            left to its lease: the engine may be reading it
was left by its client before its first output                fetched: the leg goes on until then, at most 30 s
was never sent, as prefill was cut off just as it ended       released: its answer is awaited for a moment
============================================================  ================================================

Blocks that are freed while they are read belong to the next prompt, and the reader keeps that prompt's KV in its own
cache as if it were the first one's. So in doubt the lease decides.
"""

from __future__ import annotations

import asyncio

from disagg.engines.base import Call, Dialect, Transfer
from disagg.errors import HandoffError, UpstreamError
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Header
from disagg.http.origin import Outgoing
from disagg.http.response import Response
from disagg.router.background import Background
from disagg.router.fleet import Member
from disagg.router.handoff import Handoff
from disagg.router.intake import Intake
from disagg.router.legs import Legs
from disagg.topology.spec import Stage

MAX_AT_ONCE = 64
"""Calls of this kind that may be under way; a storm of clients that leave must not become a storm on the engines."""
MAX_LATE = 1024
"""Answers of prefill that may be awaited after their clients have left, and wait for their turn to be let go."""
_LATE = "client-left-or-failed"
_TIMEOUT_S = 10.0
_TRIES = 2

Headers = tuple[Header, ...]


class Releases:
    """Tells engines what is no longer wanted, in the background.

    Args:
        legs: Instances and connections.
        dialect: What they are told.
        lease_s: How long prefill keeps KV that nobody fetches.
    """

    def __init__(self, legs: Legs, dialect: Dialect, lease_s: float) -> None:
        self._legs = legs
        self._dialect = dialect
        self._lease_s = lease_s
        self.background = Background(MAX_AT_ONCE)
        self.late = Background(MAX_LATE)
        self._room = asyncio.Semaphore(MAX_AT_ONCE)

    def release(self, handoff: Handoff, reason: str, intake: Intake) -> None:
        """Let KV go that nobody will fetch; nothing happens if it has been fetched or let go before.

        Args:
            handoff: What prefill holds.
            reason: Why, as a word for metrics.
            intake: The request.
        """
        if not handoff.pinned:
            return
        if not self._legs.fleet.is_current(handoff.member):
            handoff.unpin(None)  # it went with its process
            return
        call = self._dialect.release(intake.api, handoff.transfer, handoff.handle)
        if call is None:
            self.leave(handoff, reason)
        elif not self.background.spawn(self._release(handoff, call, reason, intake.headers)):
            self.leave(handoff, "too-many-releases")

    def forget(self, transfer: Transfer, prefill: Member, intake: Intake) -> None:
        """A prefill leg was cut off: should its engine have finished it all the same, its KV is let go.

        Args:
            transfer: The attempt.
            prefill: Who was computing the prompt.
            intake: The request.
        """
        call = self._dialect.release(intake.api, transfer, None)
        if call is not None and self._legs.fleet.is_current(prefill):
            self.background.spawn(self._forget(call, transfer, intake.headers))

    def take_late(self, response: Response, transfer: Transfer, prefill: Member, intake: Intake) -> None:
        """A prefill leg was cut off just as it ended: what its engine holds is let go.

        Args:
            response: The answer that has begun, with nobody to read it.
            transfer: The attempt.
            prefill: Who answers.
            intake: The request.
        """
        if not self.late.spawn(self._take_late(response, transfer, prefill, intake)):
            response.close()
            self._legs.metrics.left_to_lease("too-many-releases")

    def leave(self, handoff: Handoff, reason: str) -> None:
        """Leave KV to its lease; nothing happens if it has been fetched or let go before."""
        if handoff.pinned:
            handoff.unpin(handoff.since + self._lease_s)
            self._legs.metrics.left_to_lease(reason)

    def abort(self, member: Member, transfer: Transfer, headers: Headers) -> None:
        """End a leg of a transfer on an engine that notices late that its connection is closed."""
        call = self._dialect.abort(transfer)
        if call is not None and self._legs.fleet.is_current(member):
            self.background.spawn(self._abort(member, call, headers))

    async def close(self) -> None:
        """End what is under way."""
        await self.late.close()
        await self.background.close()

    async def _release(self, handoff: Handoff, call: Call, reason: str, headers: Headers) -> None:
        done = False
        try:
            done = await self._tell_a_decode(call, handoff.transfer, headers)
        finally:
            if done:
                handoff.unpin(None)
                self._legs.metrics.released(reason)
            else:
                self.leave(handoff, "release-failed")

    async def _take_late(self, response: Response, transfer: Transfer, prefill: Member, intake: Intake) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await response.read()
            if response.status != 200:
                return
            handle = self._dialect.read_handle(answer)
        except (UpstreamError, HandoffError, TimeoutError):
            return  # without a handle there is nothing that could be named to be let go
        finally:
            response.close()
        handoff = Handoff(handle, transfer, prefill, self._legs.now())
        handoff.pin()
        call = self._dialect.release(intake.api, transfer, handle)
        if call is None or not self._legs.fleet.is_current(prefill):
            self.release(handoff, _LATE, intake)
            return
        # A storm of clients that leave ends many prefills at once: their turn comes, long before a lease ends.
        async with self._room:
            await self._release(handoff, call, _LATE, intake.headers)

    async def _forget(self, call: Call, transfer: Transfer, headers: Headers) -> None:
        if not await self._tell_a_decode(call, transfer, headers):
            self._legs.metrics.left_to_lease("release-failed")

    async def _tell_a_decode(self, call: Call, transfer: Transfer, headers: Headers) -> bool:
        asked: set[str] = set()
        while len(asked) < _TRIES:
            # The first one may be just the engine that has failed the request.
            member = self._legs.pick(Stage.DECODE, (), asked)
            if member is None:
                return False
            asked.add(member.name)
            if await self._tell(member, call, (*headers, (b"x-request-id", transfer.key.encode()))):
                return True
        return False

    async def _abort(self, member: Member, call: Call, headers: Headers) -> None:
        await self._tell(member, call, headers)

    async def _tell(self, member: Member, call: Call, headers: Headers) -> bool:
        """Whether the engine did as it was told."""
        outgoing = Outgoing("POST", call.path, (JSON_TYPE, *headers), call.body)
        try:
            response = await self._legs.client.request(
                member.origin, outgoing, LegTimes(_TIMEOUT_S, _TIMEOUT_S, _TIMEOUT_S)
            )
            await response.read()
        except UpstreamError:
            return False
        return response.status in call.done
