"""What a deployment consists of, as the launcher sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from disagg.engines.base import Peer, PlannedProcess
from disagg.http.origin import Origin
from disagg.launch.instance import State


class Proof(StrEnum):
    """What a member has to show before it gets traffic, beyond answering its health check."""

    NOTHING = "nothing"
    LOCAL = "local"
    SENDS = "sends"
    RECEIVES = "receives"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a deployment over all its starts.

    Attributes:
        name: Unique in the deployment.
        proof: What it has to show.
        plan: Its process, given the incarnation and the private directory of a start.
        origin: Its HTTP server; None for a service, which is up when its ports accept connections.
        health_path: Answers 200 when it serves.
        never_ready: A log line after which a starting process will never answer.
        ports: Its ports by purpose.
        devices: Its devices, for people.
        depends_on: Members that have to be ready before its first start.
        peer: What other engines have to be told about one start, by its incarnation.
    """

    name: str
    proof: Proof
    plan: Callable[[str, str], PlannedProcess]
    origin: Origin | None = None
    health_path: str = "/health"
    ports: Mapping[str, int] = field(default_factory=dict)
    devices: str = ""
    depends_on: tuple[str, ...] = ()
    never_ready: re.Pattern[str] | None = None
    peer: Callable[[str], Peer] = lambda _incarnation: Peer()


@dataclass(frozen=True, slots=True)
class View:
    """A member at one moment, for the router and for people.

    Attributes:
        name: The member.
        state: Where it is in its life.
        incarnation: Its current or last start; empty before the first.
        detail: Why it is in that state, if there is something to say.
        seconds: How long its start has taken so far or took until it was ready; else how long it is in this state.
        starts: How often it was started.
        pid: Its main process, while there is one.
        log: Its log file.
        log_start: Where the log of the current start begins, in bytes.
    """

    name: str
    state: State
    incarnation: str
    detail: str
    seconds: float
    starts: int
    pid: int | None
    log: Path
    log_start: int
