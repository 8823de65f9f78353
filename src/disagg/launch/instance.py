"""Words for the life of one process of a deployment: its states, what can happen to it, what can be done.

`disagg.launch.transitions` decides with these; `disagg.launch.supervisor` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
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
class Stuck:
    """The log of a starting process says that it will never answer, although it runs."""

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


DeploymentEvent = Start | Tick | StopRequested
"""Events that concern the instance whatever its incarnation."""
ProcessEvent = Answered | Silent | Stuck | ProbeBegan | HandoffWorked | HandoffFailed | Died | Cleaned
"""Events about one incarnation."""
Event = DeploymentEvent | Spawned | ProcessEvent


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
        started_at: When the current start began.
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
    started_at: float = 0.0
    crashes: int = 0
    was_ready: bool = False
    misses: int = 0
    answered_at: float = 0.0
    failed_probes: int = 0
    ready_at: float | None = None
    present: bool = False
    due: float | None = None
    restart: bool = False
