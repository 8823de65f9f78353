"""What happens to one process of a deployment, decided without touching it: event in, actions out.

::

    planned ─Start▶ starting ─answers▶ healthy ─probe▶ verifying ─handoff worked▶ ready ◀─answers─┐
                       ▲                  ▲────────────────┘ handoff failed         └─silent▶ suspect
                       │
                    backoff ◀── died or was restarted, after it had been ready once
    failed  ◀── died, or was not ready in time, before it had ever been ready: ends the launch
    stopping ─▶ stopped

Time is passed in (seconds of any steady clock), incarnations are passed in, nothing here waits. Events about an
incarnation that is over are ignored, so a late report of the dead cannot touch the living.
"""

from __future__ import annotations

from dataclasses import replace

from disagg.launch.instance import (
    ALIVE,
    ANSWERING,
    Abort,
    Action,
    Answered,
    Cleaned,
    DeploymentEvent,
    Died,
    Event,
    HandoffFailed,
    HandoffWorked,
    Kill,
    Limits,
    ProbeBegan,
    ProcessEvent,
    Record,
    Silent,
    Spawn,
    Spawned,
    Start,
    State,
    StopRequested,
    Stuck,
    Terminate,
    Tick,
)

Step = tuple[Record, tuple[Action, ...]]


def decide(record: Record, event: Event, now: float, limits: Limits) -> Step:
    """The next record and what has to be done.

    Args:
        record: What is known.
        event: What happened.
        now: When, in seconds of a steady clock.
        limits: Bounds.
    """
    if isinstance(event, DeploymentEvent):
        return _on_deployment(record, event, now, limits)
    if isinstance(event, Spawned):
        if record.state is State.STARTING and not record.present:
            return replace(record, incarnation=event.incarnation, present=True, answered_at=now), ()
        return record, ()
    if event.incarnation != record.incarnation:
        return record, ()
    return _on_process(record, event, now, limits)


def _on_deployment(record: Record, event: DeploymentEvent, now: float, limits: Limits) -> Step:
    match event:
        case Start():
            return _spawn(record, now, limits) if record.state is State.PLANNED else (record, ())
        case StopRequested():
            return _stop(record, now)
        case Tick():
            return _tick(record, now, limits)


def _on_process(record: Record, event: ProcessEvent, now: float, limits: Limits) -> Step:
    step: Step = (record, ())
    match event:
        case Died(_, cause):
            step = _died(record, cause, now)
        case Cleaned():
            step = _cleaned(record, now, limits)
        case Answered():
            step = _answered(record, now), ()
        case Silent(_, reason):
            step = _silent(record, reason, now, limits)
        case Stuck(_, reason):
            if record.state is State.STARTING:
                step = _hopeless(record, reason, now)
        case ProbeBegan():
            if record.state is State.HEALTHY:
                step = _move(record, State.VERIFYING, now, record.detail), ()
        case HandoffWorked():
            step = _worked(record, now), ()
        case HandoffFailed(_, reason):
            step = _failed_probe(record, reason, now, limits)
    return step


def _spawn(record: Record, now: float, limits: Limits) -> Step:
    started = _move(record, State.STARTING, now)
    started = replace(
        started,
        starts=record.starts + 1,
        started_at=now,
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
        # A stop that was on its way to a restart has been asked for once already; only the next is in a hurry.
        return replace(record, restart=False), () if record.restart else (Kill(),)
    if record.present:
        stopping = replace(_move(record, State.STOPPING, now), due=None, restart=False)
        # What has failed or crashed is ended already; only its remains are being cleaned up.
        return stopping, (Terminate(),) if record.state in ALIVE else ()
    return replace(_move(record, State.STOPPED, now), due=None), ()


def _tick(record: Record, now: float, limits: Limits) -> Step:
    if record.ready_at is not None and record.crashes and now - record.ready_at >= limits.backoff_reset_s:
        return replace(record, crashes=0), ()
    if record.due is None or now < record.due:
        return record, ()
    if record.state is State.BACKOFF and not record.present:
        return _spawn(record, now, limits)
    if record.state is State.STARTING:
        return _late(record, now, limits)
    return record, ()


def _late(record: Record, now: float, limits: Limits) -> Step:
    return _hopeless(record, f"gave no good answer to its health check within {limits.start_timeout_s:g} s", now)


def _hopeless(record: Record, reason: str, now: float) -> Step:
    if record.was_ready:
        return _restart(record, reason, now)
    return replace(_move(record, State.FAILED, now, reason), due=None), (Kill(), Abort(reason))


def _died(record: Record, cause: str, now: float) -> Step:
    if record.state is State.STOPPING or record.state not in ALIVE:
        return record, ()
    if not record.was_ready:
        return replace(_move(record, State.FAILED, now, cause), due=None), (Abort(cause),)
    return replace(_move(record, State.BACKOFF, now, cause), due=None, ready_at=None), ()


def _cleaned(record: Record, now: float, limits: Limits) -> Step:
    if record.state in ALIVE:  # its death was not reported, which a cleaned tree implies
        record, actions = _died(record, "ended", now)
        ended, further = _cleaned(record, now, limits)
        return ended, (*actions, *further)
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
    stopping = _move(record, State.STOPPING, now, reason)
    return replace(stopping, due=None, ready_at=None, restart=True), (Terminate(),)


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
