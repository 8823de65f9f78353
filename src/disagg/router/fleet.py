"""Who is there: the members of each stage, their incarnations, states and open requests.

A member is one *incarnation* of an instance. An instance that starts again gets a new member object, so whatever
still holds the old one closes its books there and never touches the new one's counters. The launcher tells the
fleet what happens to processes; the router reads snapshots and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from disagg.engines.base import Peer
from disagg.http.origin import Origin
from disagg.policy.base import Snapshot
from disagg.policy.breaker import Breaker
from disagg.topology.spec import Stage

_UNKNOWN = Peer()


class State(StrEnum):
    """What an incarnation can be given.

    `STARTING` and `DRAINING` get no new requests but keep those they have; `DOWN` means that the process is gone,
    and ends them at once.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class Member:
    """One incarnation of one instance.

    Attributes:
        name: The instance's name, stable over restarts.
        stage: The stage that it serves.
        origin: Where its HTTP server is.
        incarnation: Unique to this start.
        peer: What other engines have to be told about it.
        state: What it can be given.
        in_flight: Requests that the router has open on it.
        breaker: Its circuit breaker; None until it has failed once.
        engine_seen: What it has called itself in handles so far, where nobody told it before.
        held: It works too badly to be chosen, although it is ready.
        parked: An operator has taken it out of service: no new requests, whatever its state.
        pinned: Prompts whose KV it holds for a decode leg that is not over yet.
        foreign: Requests that it had from others when it told last; None if that is not known.
    """

    __slots__ = (
        "_snapshot",
        "breaker",
        "engine_seen",
        "foreign",
        "held",
        "in_flight",
        "incarnation",
        "name",
        "origin",
        "parked",
        "peer",
        "pinned",
        "pinned_until_s",
        "stage",
        "state",
    )

    def __init__(self, name: str, stage: Stage, url: str, incarnation: str, peer: Peer) -> None:
        self.name = name
        self.stage = stage
        self.origin = Origin.parse(url)
        self.incarnation = incarnation
        self.peer = peer
        self.state = State.STARTING
        self.in_flight = 0
        self.breaker: Breaker | None = None
        self.engine_seen = ""
        self.held = False
        self.parked = False
        self.pinned = 0
        self.pinned_until_s = 0.0
        self.foreign: int | None = None
        self._snapshot: Snapshot | None = None

    def set_state(self, state: State) -> None:
        """Change what it can be given."""
        self.state = state
        self._snapshot = None

    def hold(self, held: bool) -> None:
        """Keep it out of the choice, or let it in again."""
        if held is not self.held:
            self.held = held
            self._snapshot = None

    def park(self, parked: bool) -> None:
        """Take it out of service, or back in."""
        self.parked = parked
        self._snapshot = None

    def pin(self) -> None:
        """It has prefilled a prompt, whose KV stays until `unpin`."""
        self.pinned += 1

    def unpin(self, lease_ends_s: float | None) -> None:
        """A decode leg has fetched the KV (None), or nobody will and its lease frees it at this monotonic time."""
        self.pinned -= 1
        if lease_ends_s is not None and lease_ends_s > self.pinned_until_s:
            self.pinned_until_s = lease_ends_s

    def idle(self, now_s: float) -> bool:
        """Whether stopping it harms nobody: no open request, and no KV that a decode leg could still fetch."""
        return not self.in_flight and not self.pinned and now_s >= self.pinned_until_s

    def count(self, change: int) -> None:
        """A request was opened (1) or closed (-1)."""
        self.in_flight += change
        self._snapshot = None

    def set_foreign(self, requests: int | None) -> None:
        """The instance told how many requests it has from others, or has not told for long."""
        self.foreign = requests
        self._snapshot = None

    @property
    def ready(self) -> bool:
        """Whether it may be given new requests."""
        return self.state is State.READY and not self.parked

    @property
    def shown_state(self) -> State:
        """Its state as users see it: one that an operator parks is draining."""
        return State.DRAINING if self.parked and self.state is State.READY else self.state

    def snapshot(self) -> Snapshot:
        """What policies see."""
        if self._snapshot is None:
            ready = self.ready and not self.held
            self._snapshot = Snapshot(self.name, ready, self.in_flight, self.foreign)
        return self._snapshot

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        return self.origin.url


class Fleet:
    """The members of all stages.

    Args:
        needed: Stages that must have a ready member for the deployment to be ready.
    """

    def __init__(self, needed: tuple[Stage, ...]) -> None:
        self.needed = needed
        self._members: dict[str, Member] = {}
        self._by_stage: dict[Stage, list[Member]] = {stage: [] for stage in Stage}
        self._listeners: list[Callable[[Member], None]] = []
        self._doubters: list[Callable[[Member, bool], None]] = []

    def on_gone(self, listener: Callable[[Member], None]) -> None:
        """Call `listener` with each incarnation that is down, replaced or removed."""
        self._listeners.append(listener)

    def on_doubt(self, listener: Callable[[Member, bool], None]) -> None:
        """Call `listener` with each incarnation that has failed a leg, and whether it seems to be another engine."""
        self._doubters.append(listener)

    def doubt(self, member: Member, *, changed: bool = False) -> None:
        """A leg has failed on this incarnation, or its answer names another engine than the answers before."""
        for listener in self._doubters:
            listener(member, changed)

    def add(self, name: str, stage: Stage, url: str, incarnation: str, peer: Peer = _UNKNOWN) -> Member:
        """Make an instance known; it is `STARTING`.

        Raises:
            ValueError: If the name is taken (see `update`), or the URL is not an ``http`` one.
        """
        if name in self._members:
            raise ValueError(f"instance {name} is in the fleet already; a new start of it is an update")
        member = Member(name, stage, url, incarnation, peer)
        self._members[name] = member
        self._by_stage[stage].append(member)
        return member

    def update(self, name: str, incarnation: str, url: str | None = None, peer: Peer = _UNKNOWN) -> Member:
        """An instance starts again: its old incarnation is gone, the new one is `STARTING`.

        Args:
            name: A known instance.
            incarnation: Of the new start. The same as before only adds what was not known of it.
            url: New base URL, if it has changed.
            peer: What other engines have to be told about it.

        Raises:
            KeyError: If the instance is unknown.
        """
        old = self._members[name]
        member = Member(name, old.stage, url or old.url, incarnation, peer)
        if old.incarnation == incarnation and member.origin == old.origin:
            old.peer = peer if peer is not _UNKNOWN else old.peer
            return old
        # What an operator took out of service stays out when it comes back.
        member.parked = old.parked
        self._members[name] = member
        stage = self._by_stage[old.stage]
        stage[stage.index(old)] = member
        self._gone(old)
        return member

    def mark(self, name: str, incarnation: str, state: State) -> bool:
        """Set the state of an incarnation.

        Returns:
            False if the instance is unknown or this incarnation is no longer the current one: news about a process
            that has been replaced must not touch its successor.
        """
        member = self._members.get(name)
        if member is None or member.incarnation != incarnation:
            return False
        if state is State.DOWN and member.state is not State.DOWN:
            self._gone(member)
        else:
            member.set_state(state)
        return True

    def remove(self, name: str) -> None:
        """Forget an instance; requests that are open on it end at once.

        Raises:
            KeyError: If the instance is unknown.
        """
        member = self._members.pop(name)
        self._by_stage[member.stage].remove(member)
        self._gone(member)

    def get(self, name: str) -> Member | None:
        """The current incarnation of an instance."""
        return self._members.get(name)

    def is_current(self, member: Member) -> bool:
        """Whether this incarnation is the instance's current one, and alive."""
        return self._members.get(member.name) is member and member.state is not State.DOWN

    def members(self, stage: Stage | None = None) -> tuple[Member, ...]:
        """All members, or those of a stage, in the order in which they were added."""
        return tuple(self._members.values() if stage is None else self._by_stage[stage])

    def snapshots(self, stage: Stage) -> list[Snapshot]:
        """What policies see of a stage."""
        return [m.snapshot() for m in self._by_stage[stage]]

    def has_choice(self, stage: Stage) -> bool:
        """Whether a stage has more than one member, ready or not."""
        return len(self._by_stage[stage]) > 1

    def needs(self, stage: Stage) -> bool:
        """Whether the deployment has this stage, ready or not."""
        return stage in self.needed or bool(self._by_stage[stage])

    def missing_stages(self) -> tuple[Stage, ...]:
        """Needed stages without a ready member."""
        return tuple(s for s in self.needed if not any(m.ready for m in self._by_stage[s]))

    def _gone(self, member: Member) -> None:
        member.set_state(State.DOWN)
        for listener in self._listeners:
            listener(member)
