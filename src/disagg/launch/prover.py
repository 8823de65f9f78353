"""Lets members that answer prove that requests through them work, all in parallel, and again after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Protocol

from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.launch import handoff_probe
from disagg.launch.handoff_probe import ProbePlan, Side
from disagg.launch.instance import ANSWERING, Event, HandoffFailed, HandoffWorked, ProbeBegan, Record, State
from disagg.launch.member import Member, Proof
from disagg.launch.pairing import Pair, Peer, next_pairs

log = logging.getLogger("disagg.launch")

_PAUSE_FIRST_S = 0.5
_PAUSE_MAX_S = 30.0


class Fleet(Protocol):
    """The supervisor as the prover sees it."""

    def record(self, name: str) -> Record:
        """What is known of a member now."""
        ...

    def feed(self, name: str, event: Event) -> None:
        """Something happened to a member."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run in the background for as long as the deployment lives."""
        ...

    def look_soon(self, delay_s: float = 0.0) -> None:
        """Call `Prover.look` in a while."""
        ...


class Prover:
    """Starts probes whenever `look` finds members that owe a proof.

    Args:
        members: All members of the deployment.
        fleet: Where they stand, and who hears of the outcome.
        client: Connections to use.
        plan: What to send; None if no member owes more than its health check.
    """

    def __init__(self, members: Iterable[Member], fleet: Fleet, client: Client, plan: ProbePlan | None) -> None:
        self._members = {m.name: m for m in members}
        self._fleet = fleet
        self._client = client
        self._plan = plan
        self._busy: set[str] = set()
        self._resting: set[str] = set()
        self._tries: dict[Pair, int] = {}
        self._worked: set[Pair] = set()

    def look(self) -> None:
        """Start every probe that is due. Called after every change of a member's state."""
        self._forget_the_dead()
        for name, member in self._members.items():
            record = self._fleet.record(name)
            if record.state is not State.HEALTHY or record.incarnation in self._busy | self._resting:
                continue
            if member.proof is Proof.NOTHING or self._plan is None:
                self._fleet.feed(name, HandoffWorked(record.incarnation))
            elif member.proof is Proof.LOCAL and member.origin is not None:
                probe = handoff_probe.probe_local(self._client, self._plan, member.origin)
                self._begin({name: record.incarnation}, probe, None)
        senders, receivers = self._peers(Proof.SENDS), self._peers(Proof.RECEIVES)
        for p, d in next_pairs(senders, receivers, self._busy, self._tries, self._worked):
            self._begin_handoff(p, d)

    def _begin_handoff(self, prefill: Peer, decode: Peer) -> None:
        source, target = self._members[prefill.name], self._members[decode.name]
        if source.origin is None or target.origin is None or self._plan is None:
            return
        sides = (
            Side(source.origin, source.peer(prefill.incarnation)),
            Side(target.origin, target.peer(decode.incarnation)),
        )
        probe = handoff_probe.probe_handoff(self._client, self._plan, *sides)
        involved = {prefill.name: prefill.incarnation, decode.name: decode.incarnation}
        self._begin(involved, probe, (prefill.incarnation, decode.incarnation))

    def _begin(self, involved: Mapping[str, str], probe: Coroutine[None, None, object], pair: Pair | None) -> None:
        self._busy.update(involved.values())
        for name, incarnation in involved.items():
            self._fleet.feed(name, ProbeBegan(incarnation))
        self._fleet.spawn(self._finish(involved, probe, pair))

    async def _finish(
        self, involved: Mapping[str, str], probe: Coroutine[None, None, object], pair: Pair | None
    ) -> None:
        try:
            await probe
        except UpstreamError as error:
            self._failed(involved, str(error), pair)
        else:
            if pair is not None:
                self._worked.add(pair)
            for name, incarnation in involved.items():
                self._fleet.feed(name, HandoffWorked(incarnation))
        finally:
            self._busy.difference_update(involved.values())
            self._fleet.look_soon()

    def _failed(self, involved: Mapping[str, str], reason: str, pair: Pair | None) -> None:
        if pair is not None:
            self._tries[pair] = self._tries.get(pair, 0) + 1
        log.warning("no handoff over %s: %s", " → ".join(involved), reason)
        over = f"{' → '.join(involved)}: {reason}" if pair is not None else reason
        for name, incarnation in involved.items():
            record = self._fleet.record(name)
            if record.state is State.READY:
                continue  # it has proved itself with another partner, so this is not held against it
            pause_s = min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(record.failed_probes, 16))
            self._resting.add(incarnation)
            self._fleet.feed(name, HandoffFailed(incarnation, over))
            self._fleet.spawn(self._rest(incarnation, pause_s))

    async def _rest(self, incarnation: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._resting.discard(incarnation)
        self._fleet.look_soon()

    def _peers(self, proof: Proof) -> list[Peer]:
        peers = []
        for name, member in self._members.items():
            record = self._fleet.record(name)
            if member.proof is proof and record.state in ANSWERING and record.incarnation not in self._resting:
                peers.append(Peer(name, record.incarnation, proven=record.state is State.READY))
        return peers

    def _forget_the_dead(self) -> None:
        living = {self._fleet.record(name).incarnation for name in self._members}
        self._worked = {pair for pair in self._worked if living.issuperset(pair)}
        self._tries = {pair: count for pair, count in self._tries.items() if living.issuperset(pair)}
