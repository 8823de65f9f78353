"""What one change of a topology would do: a replica more, a faster link, another shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from disagg.cost.memory import GIB
from disagg.errors import ConfigError
from disagg.project.capacity import capacity
from disagg.project.outcome import Outcome
from disagg.project.run import solve
from disagg.project.setup import Setup, make_setup
from disagg.topology.spec import Pool, Stage, Topology

_MS = 1e3


@dataclass(frozen=True, slots=True)
class Variant:
    """One change, and what follows from it.

    Attributes:
        name: The change, in words.
        devices: Devices of all pools then.
        ttft_ms: Time to first token.
        itl_ms: Time between tokens.
        request_rate: Requests/s that can be served.
        tokens_per_device: Input and output tokens/s over all devices.
        refused: Why it cannot be done; the figures are 0 then.
    """

    name: str
    devices: int
    ttft_ms: float
    itl_ms: float
    request_rate: float
    tokens_per_device: float
    refused: str = ""


def sensitivity(setup: Setup) -> tuple[Variant, ...]:
    """The topology itself, and each change by itself, under the same load."""
    found = [_variant("as it is", setup.topology)]
    return (*found, *(_variant(name, topology) for name, topology in _changes(setup)))


def _changes(setup: Setup) -> Iterator[tuple[str, Topology]]:
    topology = setup.topology
    for stage, pool_setup in setup.pools.items():
        pool = topology.pool(stage)
        if pool is None or stage is Stage.ENCODE:
            continue
        more = {"replicas": pool_setup.replicas + 1, "device_groups": None, "ports": None}
        yield f"{stage}: one replica more", _with_pool(topology, stage, pool.model_copy(update=more))
        tensor = pool.parallel.tensor * 2
        wider = {"parallel": pool.parallel.model_copy(update={"tensor": tensor}), "device_groups": None}
        yield f"{stage}: tensor parallelism {tensor}", _with_pool(topology, stage, pool.model_copy(update=wider))
    if setup.split and setup.link is not None:
        doubled = setup.link.bandwidth * 2 / GIB
        settings = topology.projection.model_copy(update={"kv_transfer_bw_gbps": doubled})
        link = topology.link.model_copy(update={"bandwidth_gbps": None})
        yield "link twice as fast", topology.model_copy(update={"projection": settings, "link": link})


def _with_pool(topology: Topology, stage: Stage, pool: Pool) -> Topology:
    return topology.model_copy(update={stage.value: pool})


def _variant(name: str, topology: Topology) -> Variant:
    try:
        setup = make_setup(topology)
        outcome = solve(setup, np.asarray(capacity(setup).used))
    except ConfigError as error:
        return Variant(name, 0, 0.0, 0.0, 0.0, 0.0, refused=error.problems[0].message)
    return Variant(
        name=name,
        devices=setup.devices,
        ttft_ms=float(outcome.ttft) * _MS,
        itl_ms=float(outcome.itl) * _MS,
        request_rate=float(outcome.request_rate),
        tokens_per_device=_tokens(setup, outcome) / setup.devices,
    )


def _tokens(setup: Setup, outcome: Outcome) -> float:
    return float(outcome.request_rate) * float(setup.workload.input_tokens + setup.workload.output_tokens)
