"""Seconds of collective communication between the devices of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from disagg.catalog.accelerator import Accelerator, CollectiveCurve, Fabric
from disagg.cost.curves import measured_seconds
from disagg.cost.work import Array
from disagg.errors import ConfigError, Problem

ALL_REDUCE_ALGORITHMS = ("auto", "ring", "one_shot", "two_shot", "hierarchical")
ALL_TO_ALL_ALGORITHMS = ("auto", "direct", "single_shot", "hierarchical")


class Collective(StrEnum):
    """What devices exchange. The value is the name of its part of a step."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "point_to_point"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Equal collectives of one step.

    Attributes:
        kind: Which.
        ranks: Devices that take part in one.
        calls: How many one after another.
        size: Bytes of one, by point: all-reduce the vector that every rank has; all-gather and reduce-scatter the
            whole vector; all-to-all what one rank sends to all ranks, itself included; send what is sent.
    """

    kind: Collective
    ranks: int
    calls: float
    size: Array


@dataclass(frozen=True, slots=True)
class Network:
    """How a replica's devices are joined.

    Attributes:
        inner: The network inside a node.
        outer: The one between nodes; None if not known.
        inner_ranks: Devices of a node that belong to the replica.
        curves: Measured collectives inside a node.
    """

    inner: Fabric
    outer: Fabric | None
    inner_ranks: int
    curves: Mapping[str, tuple[CollectiveCurve, ...]] = field(default_factory=dict)


def network(accelerator: Accelerator, devices: int) -> Network | None:
    """The network of a replica of so many devices; None for a single one, which needs none.

    Raises:
        ConfigError: If the accelerator has no network that joins so many.
    """
    if devices == 1:
        return None
    inner, outer = accelerator.scale_up, accelerator.scale_out
    where = f"accelerator {accelerator.name}"
    if inner is None:
        if outer is None:
            raise ConfigError([Problem(where, f"has no link between devices; {devices} devices need one")])
        return Network(outer, None, devices)
    inner_ranks = devices if inner.devices is None else min(devices, inner.devices)
    if inner_ranks < devices and outer is None:
        message = f"joins {inner.devices} devices and has no figure for links between nodes; {devices} are needed"
        raise ConfigError([Problem(where, message)])
    return Network(inner, outer, inner_ranks, accelerator.collectives)


def network_notes(net: Network) -> list[str]:
    """The figures that communication rests on, as text."""
    notes = []
    for name, fabric in (("scale-up", net.inner), ("scale-out", net.outer)):
        if fabric is not None:
            notes.append(f"{name} bandwidth: {fabric.bandwidth}")
            notes.append(f"{name} share that collectives reach: {fabric.efficiency}")
            notes.append(f"{name} latency: {fabric.latency}")
    sources = {f"collectives inside a node: {c.origin}: {c.source}" for curves in net.curves.values() for c in curves}
    return notes + sorted(sources)


def seconds(exchange: Exchange, net: Network, *, allreduce: str = "auto", alltoall: str = "auto") -> Array:
    """Time of all calls.

    Args:
        exchange: What is exchanged.
        net: Over what.
        allreduce: One of ALL_REDUCE_ALGORITHMS. `auto` takes the fastest, and measured times where there are any.
        alltoall: One of ALL_TO_ALL_ALGORITHMS; the same.

    Returns:
        Seconds, shape of the sizes. No bytes take no time.
    """
    size, ranks = np.asarray(exchange.size, dtype=np.float64), exchange.ranks
    if ranks <= 1:
        return np.zeros(size.shape)
    match exchange.kind:
        case Collective.ALL_REDUCE:
            one = _all_reduce(size, ranks, net, allreduce)
        case Collective.ALL_TO_ALL:
            one = _all_to_all(size, ranks, net, alltoall)
        case Collective.SEND:
            fabric = net.inner if net.outer is None or ranks <= net.inner_ranks else net.outer
            one = size / _bandwidth(fabric) + fabric.latency.value
        case _:
            one = _gather(size, ranks, net, exchange.kind)
    taken: Array = np.where(size > 0, one * exchange.calls, 0.0)
    return taken


def _bandwidth(fabric: Fabric) -> float:
    return fabric.bandwidth.value * fabric.efficiency.value


def _levels(net: Network, ranks: int) -> tuple[int, int]:
    """Ranks inside a node and nodes, for a group of consecutive ranks."""
    inside = min(ranks, net.inner_ranks)
    return inside, -(-ranks // inside)


def _measured(net: Network, name: str, ranks: int, size: Array) -> Array | None:
    """Measured time, if the group is inside one node and of a size that was measured."""
    if ranks > net.inner_ranks or name not in net.curves:
        return None
    return measured_seconds(net.curves[name], ranks, size)


def _gather(size: Array, ranks: int, net: Network, kind: Collective) -> Array:
    """All-gather or reduce-scatter: (N - 1) / N of the vector leaves each rank, over the slowest link on the way.

    Libraries pass small vectors along trees, in log2(N) steps of a hop's latency; a ring's N - 1 steps matter only
    where the bytes do.
    """
    taken = _measured(net, kind.value, ranks, size)
    if taken is not None:
        return taken
    inside, nodes = _levels(net, ranks)
    slowest = net.inner if nodes == 1 or net.outer is None else net.outer
    return size * ((ranks - 1) / ranks) / _bandwidth(slowest) + _steps(net, inside, nodes)


def _steps(net: Network, inside: int, nodes: int) -> float:
    """Latency of log2(N) hops at each level."""
    latency = net.inner.latency.value * float(np.log2(max(inside, 1)))
    if nodes > 1 and net.outer is not None:
        latency += net.outer.latency.value * float(np.log2(nodes))
    return latency


def _all_reduce(size: Array, ranks: int, net: Network, algorithm: str) -> Array:
    """The ring sends 2 (N - 1) / N of the vector; one-shot reads all N - 1 others in a single hop; two-shot is a
    reduce-scatter and an all-gather of one hop each; the hierarchical one crosses nodes with 1 / ranks per node."""
    inside, nodes = _levels(net, ranks)
    crossing = nodes > 1 and net.outer is not None
    slowest = net.outer if crossing and net.outer is not None else net.inner
    wire, hop = _bandwidth(slowest), slowest.latency.value
    part = size * ((ranks - 1) / ranks) / wire
    costs = {
        "ring": 2.0 * (part + _steps(net, inside, nodes)),
        "one_shot": size * (ranks - 1) / wire + hop,
        "two_shot": 2.0 * (part + hop),
    }
    if crossing and net.outer is not None:
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        within = sum((_gather(size, inside, net, half) for half in halves), np.zeros(()))
        between = size / inside * ((nodes - 1) / nodes) / wire + net.outer.latency.value * float(np.log2(nodes))
        costs["hierarchical"] = within + 2.0 * between
    if algorithm == "auto":
        found = [_measured(net, name, ranks, size) for name in ("all_reduce", "custom_all_reduce")]
        known = [time for time in found if time is not None]
        if known:
            return _least(known)
    return _chosen(costs, algorithm, "hierarchical", "ring")


def _all_to_all(size: Array, ranks: int, net: Network, algorithm: str) -> Array:
    """Each rank keeps 1 / N of what it sends. `direct` opens one exchange per peer, `single_shot` all at once;
    `hierarchical` crosses nodes to the peer of the same position first, which spreads it inside its node."""
    inside, nodes = _levels(net, ranks)
    inner, outer = net.inner, net.outer
    if nodes == 1 or outer is None:
        taken = _measured(net, Collective.ALL_TO_ALL.value, ranks, size) if algorithm == "auto" else None
        if taken is not None:
            return taken
        part, hop = size * ((ranks - 1) / ranks) / _bandwidth(inner), inner.latency.value
        near = {"direct": part + hop * float(np.log2(ranks)), "single_shot": part + hop}
        return _chosen(near, algorithm, "hierarchical", "direct")
    stays = size * ((inside - 1) / ranks) / _bandwidth(inner)
    leaves = size * ((ranks - inside) / ranks) / _bandwidth(outer)
    far = outer.latency.value
    spread = size * ((inside - 1) / inside) / _bandwidth(inner) + inner.latency.value
    costs = {
        "direct": np.maximum(stays, leaves) + far * float(np.log2(ranks)),
        "single_shot": np.maximum(stays, leaves) + far,
        "hierarchical": leaves + far + spread,
    }
    return _chosen(costs, algorithm, "hierarchical", "direct")


def _chosen(costs: Mapping[str, Array], algorithm: str, optional: str, otherwise: str) -> Array:
    """The named algorithm's time, or the least; the one that needs several nodes is replaced where there is one."""
    if algorithm == "auto":
        return _least(list(costs.values()))
    return costs[otherwise if algorithm == optional and optional not in costs else algorithm]


def _least(times: list[Array]) -> Array:
    least = times[0]
    for time in times[1:]:
        least = np.minimum(least, time)
    return least
