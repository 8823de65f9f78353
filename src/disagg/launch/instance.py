"""What happens to one process of a deployment, decided without touching it: event in, actions out.

::

    planned ─Start▶ starting ─answers▶ healthy ─probe▶ verifying ─handoff worked▶ ready ◀─answers─┐
                       ▲                  ▲────────────────┘ handoff failed         └─silent▶ suspect
                       │
                    backoff ◀── died or was restarted, after it had been ready once
    failed  ◀── died, or was not ready in time, before it had ever been ready: ends the launch
    stopping ─▶ stopped

Time is passed in (seconds of any steady clock), incarnations are passed in, nothing here waits. `Supervisor`
carries the actions out and feeds what it sees back. Events about an incarnation that is over are ignored, so a
late report of the dead cannot touch the living.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class State(StrEnum):
    """Where an instance is in its life."""

    PLANNED = "planned"
    STARTING = "starting"
    HEALTHY = "healthy"
    VERIFYING = "verifying"
    READY = "ready"
    SUSPECT = "suspect"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ALIVE = frozenset({State.STARTING, State.HEALTHY, State.VERIFYING, State.READY, State.SUSPECT})
"""States in which a process runs that nobody has asked to end."""
ANSWERING = frozenset({State.HEALTHY, State.VERIFYING, State.READY})
"""States in which the instance answers, so that a handoff through it can be tried."""
OVER = frozenset({State.STOPPED, State.FAILED})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one instance's life.

    Attributes:
        start_timeout_s: From the start of the process to its first good health answer.
        backoff_first_s: Pause before the first restart; doubles with every further one.
        backoff_max_s: The longest pause before a restart.
        backoff_reset_s: Ready for this long, an instance starts again with the first pause.
        suspect_after: Unanswered health checks in a row before it gets no traffic.
        silence_limit_s: A living process without any answer for this long is restarted. Long, because an
            engine that is busy with a huge prompt may not answer and is not dead.
        handoff_attempts: Failed handoff probes in a row that end a launch.
    """

    start_timeout_s: float = 600.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    backoff_reset_s: float = 300.0
    suspect_after: int = 3
    silence_limit_s: float = 120.0
    handoff_attempts: int = 5


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the first start."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process of a new incarnation is about to start."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A health check was answered well."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Silent:
    """A health check got no good answer."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeBegan:
    """A handoff through this instance is being tried."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class HandoffWorked:
    """A handoff through this instance moved KV, or it needs none."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """No handoff through this instance worked."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended; what is left of its tree is still being cleaned up."""

    incarnation: str
    cause: str


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Nothing of the incarnation is left, so its ports and devices are free."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The deployment ends. A second one is in a hurry."""


Event = (
    Start
    | Spawned
    | Answered
    | Silent
    | ProbeBegan
    | HandoffWorked
    | HandoffFailed
    | Died
    | Cleaned
    | Tick
    | StopRequested
)


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process under a fresh incarnation, and report it as `Spawned`."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to end, and end it after the grace period."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process and its tree now."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the launch: the instance never became ready."""

    reason: str


Action = Spawn | Terminate | Kill | Abort


@dataclass(frozen=True, slots=True)
class Record:
    """All that is remembered of one instance.

    Attributes:
        state: Where it is in its life.
        incarnation: The current start, or the last one; empty before the first.
        since: When it came into this state.
        detail: Why it is there, if there is something to say.
        starts: How often it was started.
        crashes: Unplanned ends in a row, which lengthen the pause before a restart.
        was_ready: It has been ready once, so its end is a crash to recover from and not a failed launch.
        misses: Health checks in a row without a good answer.
        answered_at: When it last answered well, or was started.
        failed_probes: Handoff probes in a row that failed.
        ready_at: When the current incarnation became ready.
        present: Something of the current incarnation may still exist.
        due: When the next time-driven step is due: the start limit, or the restart.
        restart: `stopping` is to end in a restart.
    """

    state: State = State.PLANNED
    incarnation: str = ""
    since: float = 0.0
    detail: str = ""
    starts: int = 0
    crashes: int = 0
    was_ready: bool = False
    misses: int = 0
    answered_at: float = 0.0
    failed_probes: int = 0
    ready_at: float | None = None
    present: bool = False
    due: float | None = None
    restart: bool = False


Step = tuple[Record, tuple[Action, ...]]


def decide(record: Record, event: Event, now: float, limits: Limits) -> Step:
    """The next record and what has to be done.

    Args:
        record: What is known.
        event: What happened.
        now: When, in seconds of a steady clock.
        limits: Bounds.
    """
    match event:
        case Start():
            return _start(record, now, limits)
        case StopRequested():
            return _stop(record, now)
        case Tick():
            return _tick(record, now, limits)
        case Spawned(incarnation):
            if record.state is State.STARTING and not record.present:
                return replace(record, incarnation=incarnation, present=True, answered_at=now), ()
            return record, ()
        case _ if event.incarnation != record.incarnation:
            return record, ()
        case Died(_, cause):
            return _died(record, cause, now)
        case Cleaned():
            return _cleaned(record, now, limits)
        case Answered():
            return _answered(record, now), ()
        case Silent(_, reason):
            return _silent(record, reason, now, limits)
        case ProbeBegan():
            if record.state is State.HEALTHY:
                return _move(record, State.VERIFYING, now), ()
            return record, ()
        case HandoffWorked():
            return _worked(record, now), ()
        case HandoffFailed(_, reason):
            return _failed_probe(record, reason, now, limits)


def _start(record: Record, now: float, limits: Limits) -> Step:
    if record.state is not State.PLANNED:
        return record, ()
    return _spawn(record, now, limits)


def _spawn(record: Record, now: float, limits: Limits) -> Step:
    started = _move(record, State.STARTING, now)
    started = replace(
        started,
        starts=record.starts + 1,
        misses=0,
        failed_probes=0,
        ready_at=None,
        present=False,
        restart=False,
        due=now + limits.start_timeout_s,
    )
    return started, (Spawn(),)


def _stop(record: Record, now: float) -> Step:
    if record.state is State.STOPPING:
        return replace(record, restart=False), (Kill(),) if not record.restart else (Terminate(),)
    if record.present:
        stopping = replace(_move(record, State.STOPPING, now), due=None, restart=False)
        # What has failed or crashed is ended already; only its remains are being cleaned up.
        return stopping, (Terminate(),) if record.state in ALIVE else ()
    return replace(_move(record, State.STOPPED, now), due=None), ()


def _tick(record: Record, now: float, limits: Limits) -> Step:
    if record.state is State.READY and record.ready_at is not None and record.crashes:
        if now - record.ready_at >= limits.backoff_reset_s:
            return replace(record, crashes=0), ()
        return record, ()
    if record.due is None or now < record.due:
        return record, ()
    if record.state is State.BACKOFF and not record.present:
        return _spawn(record, now, limits)
    if record.state is State.STARTING:
        reason = f"gave no good answer to its health check within {limits.start_timeout_s:g} s"
        if record.was_ready:
            return _restart(record, reason, now)
        return replace(_move(record, State.FAILED, now, reason), due=None), (Kill(), Abort(reason))
    return record, ()


def _died(record: Record, cause: str, now: float) -> Step:
    if record.state is State.STOPPING or record.state not in ALIVE:
        return record, ()
    if not record.was_ready:
        return replace(_move(record, State.FAILED, now, cause), due=None), (Abort(cause),)
    return replace(_move(record, State.BACKOFF, now, cause), due=None), ()


def _cleaned(record: Record, now: float, limits: Limits) -> Step:
    gone = replace(record, present=False)
    if record.state is State.STOPPING and not record.restart:
        return _move(gone, State.STOPPED, now), ()
    if record.state is State.BACKOFF or record.state is State.STOPPING:
        pause_s = min(limits.backoff_max_s, limits.backoff_first_s * 2.0 ** min(record.crashes, 32))
        waiting = _move(gone, State.BACKOFF, now, record.detail)
        return replace(waiting, crashes=record.crashes + 1, due=now + pause_s, restart=False), ()
    return gone, ()


def _answered(record: Record, now: float) -> Record:
    seen = replace(record, misses=0, answered_at=now)
    if record.state is State.STARTING and record.present:
        return replace(_move(seen, State.HEALTHY, now), due=None)
    if record.state is State.SUSPECT:
        return _move(seen, State.READY if record.ready_at is not None else State.HEALTHY, now)
    return seen


def _silent(record: Record, reason: str, now: float, limits: Limits) -> Step:
    if record.state not in ANSWERING and record.state is not State.SUSPECT:
        return record, ()
    missed = replace(record, misses=record.misses + 1)
    if now - record.answered_at >= limits.silence_limit_s:
        return _restart(missed, f"no answer for {now - record.answered_at:.0f} s ({reason})", now)
    if missed.misses >= limits.suspect_after and record.state is not State.SUSPECT:
        return _move(missed, State.SUSPECT, now, f"no answer to {missed.misses} health checks ({reason})"), ()
    return missed, ()


def _restart(record: Record, reason: str, now: float) -> Step:
    return replace(_move(record, State.STOPPING, now, reason), due=None, restart=True), (Terminate(),)


def _worked(record: Record, now: float) -> Record:
    if record.state not in (State.HEALTHY, State.VERIFYING):
        return record
    return replace(_move(record, State.READY, now), was_ready=True, ready_at=now, failed_probes=0)


def _failed_probe(record: Record, reason: str, now: float, limits: Limits) -> Step:
    if record.state not in (State.HEALTHY, State.VERIFYING):
        return record, ()
    failed = replace(_move(record, State.HEALTHY, now, reason), failed_probes=record.failed_probes + 1)
    if record.was_ready or failed.failed_probes < limits.handoff_attempts:
        return failed, ()
    why = f"answers its health check, but no KV handoff through it worked: {reason}"
    return _move(failed, State.FAILED, now, why), (Kill(), Abort(why))


def _move(record: Record, state: State, now: float, detail: str = "") -> Record:
    since = record.since if record.state is state else now
    return replace(record, state=state, since=since, detail=detail)
