"""Seconds of collective communication between the devices of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from disagg.catalog.accelerator import Accelerator, Fabric
from disagg.cost.work import Array
from disagg.errors import ConfigError, Problem


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
        name: The accelerator, for messages.
        inner: The network inside a node.
        outer: The one between nodes; None if not known.
        inner_ranks: Devices of a node.
    """

    name: str
    inner: Fabric
    outer: Fabric | None
    inner_ranks: int


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
        return Network(accelerator.name, outer, outer, devices)
    inner_ranks = devices if inner.devices is None else min(devices, inner.devices)
    if inner_ranks < devices and outer is None:
        message = f"joins {inner.devices} devices and has no figure for links between nodes; {devices} are needed"
        raise ConfigError([Problem(where, message)])
    return Network(accelerator.name, inner, outer, inner_ranks)


def seconds(exchange: Exchange, net: Network, *, allreduce: str = "auto", alltoall: str = "auto") -> Array:
    """Time of all calls.

    Args:
        exchange: What is exchanged.
        net: Over what.
        allreduce: auto, ring, one_shot, two_shot or hierarchical.
        alltoall: auto, direct, single_shot or hierarchical.

    Returns:
        Seconds, shape of the sizes. No bytes take no time.
    """
    if exchange.ranks <= 1:
        return np.zeros(np.shape(exchange.size))
    match exchange.kind:
        case Collective.ALL_REDUCE:
            one = _all_reduce(exchange, net, allreduce)
        case Collective.ALL_TO_ALL:
            one = _all_to_all(exchange, net, alltoall)
        case Collective.SEND:
            fabric = net.inner if net.inner_ranks >= exchange.ranks or net.outer is None else net.outer
            one = exchange.size / _bandwidth(fabric) + fabric.latency.value
        case _:
            one = _gather(exchange.size, exchange.ranks, net)
    return np.where(exchange.size > 0, one * exchange.calls, 0.0)


def _bandwidth(fabric: Fabric) -> float:
    return fabric.bandwidth.value * fabric.efficiency.value


def _levels(net: Network, ranks: int) -> tuple[int, int]:
    """Ranks inside a node and nodes, for a group of consecutive ranks."""
    inside = min(ranks, net.inner_ranks)
    return inside, -(-ranks // inside)


def _gather(size: Array, ranks: int, net: Network) -> Array:
    """All-gather or reduce-scatter by a ring: (N - 1) / N of the vector leaves each rank, in N - 1 hops."""
    inside, nodes = _levels(net, ranks)
    fabric = net.inner if nodes == 1 or net.outer is None else net.outer
    # A ring through several nodes is as fast as its slowest link.
    return size * ((ranks - 1) / ranks) / _bandwidth(fabric) + _hops(net, inside, nodes)


def _hops(net: Network, inside: int, nodes: int) -> float:
    """Latency of passing once through all ranks of a ring that is pipelined over a tree of switches.

    Inside a node the latency figure is that of one collective step; libraries use about log2(N) of them.
    """
    outer = net.outer.latency.value if net.outer is not None and nodes > 1 else 0.0
    return net.inner.latency.value * float(np.log2(max(inside, 2))) + outer * float(np.log2(max(nodes, 1)))


def _all_reduce(exchange: Exchange, net: Network, algorithm: str) -> Array:
    inside, nodes = _levels(net, exchange.ranks)
    size, ranks = exchange.size, exchange.ranks
    hop = net.inner.latency.value
    wire = _bandwidth(net.inner if nodes == 1 or net.outer is None else net.outer)
    costs = {
        "ring": 2.0 * _gather(size, ranks, net),
        "one_shot": size * (ranks - 1) / wire + _hops(net, inside, nodes) / max(np.log2(inside), 1.0),
        "two_shot": 2.0
        * (size * ((ranks - 1) / ranks) / wire + _hops(net, inside, nodes) / max(np.log2(inside), 1.0)),
    }
    if nodes > 1 and net.outer is not None:
        across = 2.0 * (size / inside * ((nodes - 1) / nodes) / _bandwidth(net.outer) + net.outer.latency.value)
        within = 2.0 * (size * ((inside - 1) / inside) / _bandwidth(net.inner) + hop)
        costs["hierarchical"] = within + across
    return _chosen(costs, algorithm, "hierarchical", "ring")


def _all_to_all(exchange: Exchange, net: Network, algorithm: str) -> Array:
    inside, nodes = _levels(net, exchange.ranks)
    ranks, size = exchange.ranks, exchange.size
    stays = size * ((inside - 1) / ranks) / _bandwidth(net.inner)
    if nodes == 1 or net.outer is None:
        hop = net.inner.latency.value
        costs = {"direct": stays + hop * float(np.log2(ranks)), "single_shot": stays + hop}
        return _chosen(costs, algorithm, "hierarchical", "direct")
    leaves = size * ((ranks - inside) / ranks) / _bandwidth(net.outer)
    far = net.outer.latency.value
    costs = {
        "direct": np.maximum(stays, leaves) + far * nodes,
        "single_shot": np.maximum(stays, leaves) + far,
        # What leaves goes to the peer of the same position first and is spread inside the other node.
        "hierarchical": leaves
        + size * ((inside - 1) / inside) / _bandwidth(net.inner)
        + far
        + net.inner.latency.value,
    }
    return _chosen(costs, algorithm, "hierarchical", "direct")


def _chosen(costs: dict[str, Array], algorithm: str, optional: str, otherwise: str) -> Array:
    """The named algorithm's time, or the least; what needs several nodes falls back where there is one."""
    if algorithm != "auto":
        return costs[otherwise if algorithm == optional and optional not in costs else algorithm]
    least = np.asarray(np.inf)
    for cost in costs.values():
        least = np.minimum(least, cost)
    return least
