"""Everything that a topology starts, laid out before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from disagg.engines.base import EngineAdapter, Peer, PlannedProcess, StartContext
from disagg.errors import ConfigError
from disagg.launch.machine import device_ids, gather_facts, share_cores
from disagg.launch.ports import check_ports, taken_ports
from disagg.topology.instances import Instance, explicit_ports, plan_instances, shape_name
from disagg.topology.machine import check_machine, planned_ports
from disagg.topology.spec import Platform, Stage, Topology

EACH_START = "<new at each start>"
"""Stands in plans for the incarnation and the private directory, which only a start has."""
_STOP_ORDER = (Stage.PREFILL, Stage.DECODE, Stage.COLOCATED, Stage.ENCODE)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A topology on this machine.

    Attributes:
        topology: With its platform resolved.
        adapter: Of the platform's engine.
        model: The model string for every engine.
        served_model_names: Names that clients use.
        instances: With their devices and ports.
        services: What the instances need beside them, in start order.
        processes: All processes in start order, as they would be started.
        warnings: What is odd about the layout.
    """

    topology: Topology
    adapter: EngineAdapter
    model: str
    served_model_names: tuple[str, ...]
    instances: tuple[Instance, ...]
    services: tuple[PlannedProcess, ...]
    processes: tuple[PlannedProcess, ...]
    warnings: tuple[str, ...]

    @property
    def shape(self) -> str:
        """Its name in the field's words, such as ``2P1D``."""
        return shape_name(self.topology, self.instances)

    @property
    def url(self) -> str:
        """Base URL of the endpoint, as a client on this machine writes it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.topology.host, self.topology.host)  # noqa: S104
        return f"http://[{host}]:{self.topology.port}" if ":" in host else f"http://{host}:{self.topology.port}"

    def context(self, incarnation: str, run_dir: str) -> StartContext:
        """What an engine is told at one start."""
        return StartContext(self.model, self.served_model_names, incarnation, run_dir)

    def peer(self, instance: Instance, incarnation: str) -> Peer:
        """What other engines have to be told about one start of an instance."""
        return self.adapter.peer(self.topology, instance, incarnation)

    def stop_groups(self) -> list[list[str]]:
        """Names of instances that stop together, in order: who makes KV stops before who reads it."""
        groups = [[i.name for i in self.instances if i.stage is stage] for stage in _STOP_ORDER]
        return [group for group in groups if group]


def describe(topology: Topology, adapter: EngineAdapter, model: str, *, avoid: Collection[int] = ()) -> Deployment:
    """Lay a topology out on this machine; nothing is started or bound.

    Args:
        topology: Checked, with its platform resolved.
        adapter: Of that platform.
        model: The model string for every engine: a path, or a hub name.
        avoid: Ports to keep away from where the topology names none.

    Raises:
        ConfigError: If instances, ports or devices cannot be laid out.
    """
    instances = plan_instances(topology, avoid=avoid)
    warnings: tuple[str, ...] = ()
    if topology.platform is Platform.CPU:
        shared = share_cores(instances, device_ids(Platform.CPU) or ())
        instances, warnings = shared.instances, shared.warnings
    names = topology.served_model_name or (topology.model,)
    context = StartContext(model, names, EACH_START, EACH_START)
    services = adapter.services(topology, instances)
    processes = (*services, *(adapter.process(topology, instance, context) for instance in instances))
    return Deployment(topology, adapter, model, names, instances, services, processes, warnings)


def plan(topology: Topology, adapter: EngineAdapter, model: str) -> list[PlannedProcess]:
    """Every process that would start, in order.

    Raises:
        ConfigError: As `describe`.
    """
    return list(describe(topology, adapter, model).processes)


def settle(topology: Topology, adapter: EngineAdapter, model: str) -> Deployment:
    """Lay a topology out on what this machine has free now.

    Ports that the topology leaves open move past those that are taken, so a second deployment needs only another
    endpoint port.

    Raises:
        ConfigError: With every device that is missing and every port that is taken.
    """
    named = set(explicit_ports(topology).values())
    avoid: set[int] = set()
    while True:
        deployment = describe(topology, adapter, model, avoid=avoid)
        ports = planned_ports(topology, deployment.instances, topology.platform)
        movable = {port for port in taken_ports(ports) if port not in named and port not in avoid}
        movable.discard(topology.link.handoff_port)
        if not movable:
            break
        avoid |= movable
    facts = gather_facts(topology.platform, ports)
    problems = check_machine(topology, deployment.instances, topology.platform, facts)
    if problems:
        raise ConfigError(problems)
    check_ports(deployment.processes, {"the endpoint": topology.port})
    return deployment
