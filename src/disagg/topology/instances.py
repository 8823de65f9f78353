"""From pools to instances: names, devices and ports of everything that a topology starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from disagg.errors import ConfigError, Problem
from disagg.topology.spec import Pool, Stage, Topology
from disagg.units import MAX_PORT, parse_id_group

DEFAULT_PORTS: dict[Stage, int] = {
    Stage.COLOCATED: 9600,
    Stage.ENCODE: 9700,
    Stage.DECODE: 9800,
    Stage.PREFILL: 9900,
}
"""First HTTP port of a stage whose ports are not given (prefill and decode as in Qualcomm's launcher)."""

# Dialects whose prefill instances run a server at which decode instances find them.
_BOOTSTRAPPED = frozenset({"mooncake", "sglang"})


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine of one stage, with everything that is planned for it before it starts.

    Attributes:
        name: Unique in the topology and stable over restarts, such as ``prefill-0``.
        stage: The stage that it serves.
        index: Its place in the pool, from 0.
        devices: Device ids of its group, in the order written; empty if the platform needs none.
        host: Address of its HTTP server.
        port: Port of its HTTP server.
        side_channel_port: First of the ports that it reserves for the KV handoff.
        side_channel_ports: How many of them it reserves (one per data-parallel rank; two per tensor-parallel rank
            where prefill sends to receivers of decode).
        bootstrap_port: Port of its bootstrap server, for prefill instances of dialects that have one; else 0.
    """

    name: str
    stage: Stage
    index: int
    devices: tuple[int, ...]
    host: str
    port: int
    side_channel_port: int
    side_channel_ports: int = 1
    bootstrap_port: int = 0

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def pool_size(pool: Pool, stage: Stage) -> int:
    """How many instances a pool has: as many as groups or ports, else `replicas`, else 1.

    Raises:
        ConfigError: If these three do not agree.
    """
    problems = count_problems(pool, stage)
    if problems:
        raise ConfigError(problems)
    given = _counts(pool)
    return next(iter(given.values()), 1)


def count_problems(pool: Pool, stage: Stage) -> list[Problem]:
    """Say where device groups, ports and replicas of a pool disagree."""
    given = _counts(pool)
    if len(set(given.values())) < 2:
        return []
    words = {"device_groups": "device group", "ports": "port", "replicas": "replica"}
    counts = [f"{n} {words[name]}{'s' if n != 1 else ''}" for name, n in given.items()]
    message = f"{', '.join(counts[:-1])} and {counts[-1]}: each {stage} instance needs one of each"
    if "device_groups" in given and pool.device_groups is not None and len(pool.device_groups) == 1:
        message += "; separate the groups of several instances by spaces, as in 0,1 2,3"
    return [Problem(", ".join(f"{stage}.{name}" for name in given), message)]


def _counts(pool: Pool) -> dict[str, int]:
    lists = {"device_groups": pool.device_groups, "ports": pool.ports}
    given = {name: len(value) for name, value in lists.items() if value is not None}
    return given if pool.replicas is None else {**given, "replicas": pool.replicas}


def plan_instances(topology: Topology, *, avoid: Collection[int] = ()) -> tuple[Instance, ...]:
    """Lay out every instance of a topology.

    Ports that are not given are counted up from the stage's default, past those that the topology uses elsewhere.
    Each instance reserves its side-channel ports, and a bootstrap port where the dialect has one, in ranges that do
    not overlap. An instance without a device group gets no devices here; the launcher may share out CPU cores evenly.

    Args:
        topology: A topology that passed its checks.
        avoid: Further ports to keep away from where the plan is free to choose.

    Returns:
        The instances in the order of a request's life, each pool in index order.

    Raises:
        ConfigError: If counts of groups, ports and replicas disagree, or the ports run out.
    """
    used = {*explicit_ports(topology).values(), topology.link.handoff_port, *avoid}
    placed: list[tuple[Stage, Pool, int, int]] = []
    for stage, pool in _pools(topology):
        size = pool_size(pool, stage)
        ports = pool.ports or _free_ports(DEFAULT_PORTS[stage], size, used, f"{stage}.ports")
        used.update(ports)
        placed.extend((stage, pool, index, port) for index, port in enumerate(ports))
    instances: list[Instance] = []
    next_side = topology.link.side_channel_port
    next_bootstrap = topology.link.bootstrap_port
    for stage, pool, index, port in placed:
        ranks = 2 * pool.parallel.tensor if topology.link.dialect == "lmcache" else pool.parallel.data
        side = _free_range(next_side, ranks, used, "link.side_channel_port")
        next_side = side + ranks
        bootstrap = 0
        if stage is Stage.PREFILL and topology.link.dialect in _BOOTSTRAPPED:
            bootstrap = _free_range(next_bootstrap, 1, {*used, *range(side, next_side)}, "link.bootstrap_port")
            next_bootstrap = bootstrap + 1
            used.add(bootstrap)
        groups = pool.device_groups
        instances.append(
            Instance(
                name=f"{stage}-{index}",
                stage=stage,
                index=index,
                devices=parse_id_group(groups[index]) if groups is not None else (),
                host="127.0.0.1",
                port=port,
                side_channel_port=side,
                side_channel_ports=ranks,
                bootstrap_port=bootstrap,
            )
        )
    return tuple(instances)


def explicit_ports(topology: Topology) -> dict[str, int]:
    """Ports that the topology names itself, the endpoint's included, by the path of the field."""
    ports = {"port": topology.port}
    for stage, pool in _pools(topology):
        ports.update({f"{stage}.ports.{index}": port for index, port in enumerate(pool.ports or ())})
    return ports


def _pools(topology: Topology) -> Iterator[tuple[Stage, Pool]]:
    for stage in topology.stages():
        pool = topology.pool(stage)
        if pool is not None:
            yield stage, pool


def _free_ports(first: int, count: int, used: Collection[int], path: str) -> tuple[int, ...]:
    free = [port for port in range(first, min(first + count + len(used), MAX_PORT + 1)) if port not in used][:count]
    if len(free) < count:
        raise ConfigError([Problem(path, f"no {count} free ports from {first} to {MAX_PORT}; give them")])
    return tuple(free)


def _free_range(first: int, count: int, used: Collection[int], path: str) -> int:
    start = first
    while start + count - 1 <= MAX_PORT:
        taken = next((p for p in range(start + count - 1, start - 1, -1) if p in used), None)
        if taken is None:
            return start
        start = taken + 1
    raise ConfigError(
        [
            Problem(
                path,
                f"no {count} free ports in a row from {first} to {MAX_PORT}; choose a lower one",
            )
        ]
    )


def shape_name(topology: Topology, instances: Sequence[Instance]) -> str:
    """Name the shape as the field does: ``2P1D``, ``1E2PD``, ``1E2P1D``; a colocated pool adds ``+1PD``."""
    count = {stage: sum(i.stage is stage for i in instances) for stage in Stage}
    encode = f"{count[Stage.ENCODE]}E" if topology.encode is not None else ""
    decode = ""
    if topology.decode is not None:
        prefill = f"{count[Stage.PREFILL]}P" if topology.prefill is not None else ""
        decode = f"{prefill}{count[Stage.DECODE]}{'D' if prefill else 'PD'}"
    colocated = f"{count[Stage.COLOCATED]}PD" if topology.colocated is not None else ""
    return "+".join(part for part in (encode + decode, colocated) if part)
