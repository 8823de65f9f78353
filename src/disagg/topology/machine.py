"""Does the machine have what a topology asks for? Pure: the launcher gathers the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from disagg.errors import Problem
from disagg.topology.device_checks import DEVICE_WORD, device_groups
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Topology
from disagg.units import format_id_group


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What was found on the machine.

    Attributes:
        device_ids: Ids that groups may name; None if they could not be listed.
        taken_ports: TCP ports that something else listens on, with what is known of it (may be empty text).
    """

    device_ids: frozenset[int] | None = None
    taken_ports: Mapping[int, str] = field(default_factory=dict)


def planned_ports(topology: Topology, instances: Sequence[Instance], platform: Platform) -> dict[int, str]:
    """Every TCP port that a deployment binds, with the path of the field to change if it is taken."""
    ports = {topology.port: "port"}
    if platform is Platform.QAIC:
        ports[topology.link.handoff_port] = "link.handoff_port"
    for instance in instances:
        ports[instance.port] = f"{instance.stage}.ports.{instance.index}"
        for offset in range(instance.side_channel_ports):
            ports[instance.side_channel_port + offset] = "link.side_channel_port"
        if instance.bootstrap_port:
            ports[instance.bootstrap_port] = "link.bootstrap_port"
    return ports


def check_machine(
    topology: Topology, instances: Sequence[Instance], platform: Platform, facts: MachineFacts
) -> list[Problem]:
    """Devices that do not exist and ports that are taken, all at once."""
    problems: list[Problem] = []
    word = DEVICE_WORD[platform]
    if facts.device_ids is not None and platform is not Platform.EMULATED:
        have = f"it has {format_id_group(sorted(facts.device_ids))}" if facts.device_ids else "it has none"
        for group in device_groups(topology):
            absent = sorted(set(group.ids) - facts.device_ids)
            if absent:
                many = "s" if len(absent) > 1 else ""
                problems.append(
                    Problem(group.path, f"this machine has no {word}{many} {format_id_group(absent)}; {have}")
                )
    for port, path in planned_ports(topology, instances, platform).items():
        if port in facts.taken_ports:
            owner = f" by {facts.taken_ports[port]}" if facts.taken_ports[port] else ""
            problems.append(Problem(path, f"port {port} is taken{owner}; choose another"))
    return problems
