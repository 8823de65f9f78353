"""What the parent of router processes and its workers tell each other, over a socket pair that nobody else has.

::

    parent -> worker   Setup once; FleetNews whenever it changed; Change; Drain; Stop; Numbers?; Whole
    worker -> parent   Listening or Refused once; Open four times a second; Doubt; Drained; Numbers; Whole?

Frames are pickles behind their length: both ends are this program, started by the same user from the same files.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass, field

from disagg.engines.base import Dialect, Peer
from disagg.router.config import RouterConfig
from disagg.router.fleet import State
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class MemberNews:
    """One instance, as the parent's fleet has it."""

    name: str
    stage: Stage
    url: str
    incarnation: str
    peer: Peer
    state: State
    parked: bool


@dataclass(frozen=True, slots=True)
class FleetNews:
    """All instances.

    Attributes:
        members: They.
        serial: Counts up; a worker says with what it has open which news it knew.
    """

    members: tuple[MemberNews, ...]
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Other settings, as this worker's part of them, and how loud to be."""

    spec: RouterSpec
    log_level: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """A leg has failed on this incarnation, or its answer names another engine than those before."""

    name: str
    incarnation: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is started with; `fleet` is the fleet at that moment."""

    config: RouterConfig
    dialect: Dialect
    needed: tuple[Stage, ...]
    host: str
    port: int
    tick_s: float
    fleet: FleetNews
    log_level: int


@dataclass(frozen=True, slots=True)
class Listening:
    """The worker takes requests."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker cannot take requests, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class OpenLegs:
    """What one worker has open on one incarnation; times are of the system's monotonic clock, in seconds."""

    in_flight: int
    pinned: int
    pinned_until_s: float


@dataclass(frozen=True, slots=True)
class Open:
    """What a worker has open.

    Attributes:
        in_flight: Requests of clients.
        legs: By instance and incarnation.
        serial: Number of the news about the fleet that it knew then.
        moved: URLs of engines from which an exchange under way has got something since a second ago.
    """

    in_flight: int = 0
    legs: dict[tuple[str, str], OpenLegs] = field(default_factory=dict)
    serial: int = 0
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Numbers:
    """A question for a worker's metrics page, or the answer."""

    number: int
    page: bytes | None = None
    open: Open = Open()


@dataclass(frozen=True, slots=True)
class Whole:
    """A worker's question for the metrics page of all workers and what they have open, or the answer."""

    number: int
    page: bytes | None = None
    open: Open = Open()


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests and wait for those under way."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Whether all of them ended in time."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything at once."""


Message = Setup | FleetNews | Change | Listening | Refused | Open | Doubt | Numbers | Whole | Drain | Drained | Stop


class Link:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        """Send a message; nothing happens once the other end is gone."""
        if not self._writer.is_closing():
            data = pickle.dumps(message)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Message | None:
        """The next message; None once the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: Message = pickle.loads(await self._reader.readexactly(size))  # noqa: S301 - see above
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return message

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
