"""What a router is told when it is built."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from disagg.engines.base import ReadinessProbe
from disagg.router.random_ids import RandomIds
from disagg.router.spans import Tracer
from disagg.topology.router_spec import Router as RouterSpec


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time and fresh ids come from.

    Attributes:
        monotonic: Seconds that never go back; stamps handles and measures durations.
        wall: Unix time in seconds, for `created` fields.
        new_id: A fresh public request id.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    new_id: Callable[[], str] = field(default_factory=lambda: RandomIds().take)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router.

    Attributes:
        served_model_names: Names that clients use; the first one is the model's main name.
        spec: The topology's router section.
        lease_s: How long prefill keeps a prompt's KV, in seconds. A handle older than half of it is not used.
        max_model_len: Context limit in tokens shown by `/v1/models`; asked of an engine if None.
        probe: Where engines tell how busy they are; without it nobody asks them.
        access_log: Write one line of text per request to the logger ``disagg.access``.
        linger_s: How long a decode leg whose client has left may go on for its first output, in seconds: engines take
            an abort badly while KV is landing.
        access_stream: Where the JSON lines of `router.access_log` go; standard output if None.
        tracer: Makes spans; if None one is made from `router.otlp_traces_endpoint`, if that is set.
    """

    served_model_names: tuple[str, ...]
    spec: RouterSpec = field(default_factory=RouterSpec)
    lease_s: float = 30.0
    max_model_len: int | None = None
    probe: ReadinessProbe | None = None
    access_log: bool = True
    linger_s: float = 30.0
    access_stream: BinaryIO | None = None
    tracer: Tracer | None = None
