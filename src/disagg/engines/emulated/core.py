"""A running engine as its endpoints see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from disagg.engines.emulated.driver import Driver
from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.exchange import Exchange
from disagg.engines.emulated.faults import FaultBox


@dataclass(slots=True)
class Core:
    """What the parts of the HTTP side share.

    Attributes:
        engine: The state.
        driver: What runs it.
        faults: What is to go wrong.
        die: Called when a request has brought the engine down.
        control: Carries out `freeze`, `thaw`, `crash` and the like, for some seconds if a number is given.
        exchanges: Requests that are under way.
        dead: The engine is down and only the process is still there.
        silent: The whole process stands still: what arrives is not answered.
        created: When it started, in seconds since 1970.
    """

    engine: Engine
    driver: Driver
    faults: FaultBox
    die: Callable[[], None]
    control: Callable[[str, float], Awaitable[None]]
    exchanges: set[Exchange] = field(default_factory=set)
    dead: bool = False
    silent: bool = False
    created: float = 0
