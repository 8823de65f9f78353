"""From pools to instances."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.topology.instances import plan_instances, pool_size, shape_name
from disagg.topology.machine import MachineFacts, check_machine, planned_ports
from disagg.topology.spec import Platform, Pool, Stage
from tests.unit.topology.helpers import topology


def test_default_ports_are_counted_up_from_the_stages_first() -> None:
    """Names, ports and side channels of a plan are the same every time."""
    plan = plan_instances(topology(prefill={"replicas": 2}, decode={}, encode={}, colocated={}))
    assert [(i.name, i.port, i.side_channel_port) for i in plan] == [
        ("encode-0", 9700, 5600),
        ("prefill-0", 9900, 5601),
        ("prefill-1", 9901, 5602),
        ("decode-0", 9800, 5603),
        ("colocated-0", 9600, 5604),
    ]
    assert plan[0].url == "http://127.0.0.1:9700"
    assert all(i.devices == () for i in plan)


def test_devices_and_ports_go_to_instances_in_order() -> None:
    """The first group and the first port belong to the first instance."""
    plan = plan_instances(
        topology(prefill={"device_groups": ["0..1", "2,3"], "ports": [9902, 9901]}, decode={"device_groups": ["4"]})
    )
    assert [(i.devices, i.port) for i in plan] == [((0, 1), 9902), ((2, 3), 9901), ((4,), 9800)]


def test_default_ports_step_around_ports_that_are_given() -> None:
    """The endpoint, other pools and ports to avoid are left alone."""
    plan = plan_instances(topology(port=9900, prefill={"replicas": 2}, decode={"ports": [9902]}), avoid={9903})
    assert [i.port for i in plan if i.stage is Stage.PREFILL] == [9901, 9904]


def test_side_channels_are_disjoint_ranges_with_a_port_per_rank() -> None:
    """A data-parallel instance binds its first port plus the rank."""
    plan = plan_instances(
        topology(port=5603, prefill={"replicas": 2, "parallel": {"data": 2}}, decode={"parallel": {"data": 3}})
    )
    assert [(i.side_channel_port, i.side_channel_ports) for i in plan] == [(5600, 2), (5604, 2), (5606, 3)]


@settings(deadline=None)
@given(
    replicas=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    data=st.integers(1, 4),
    port=st.integers(5590, 5620) | st.integers(9590, 9610),
    side=st.integers(1, 65_000),
)
def test_no_port_is_planned_twice(replicas: list[int], data: int, port: int, side: int) -> None:
    """Whatever is given, all ports of a plan are different and in range."""
    pools = {s.value: {"replicas": n, "parallel": {"data": data}} for s, n in zip(Stage, replicas, strict=True)}
    deployment = topology(**pools, port=port, link={"side_channel_port": side})
    plan = plan_instances(deployment)
    ports = [port, deployment.link.handoff_port]
    for instance in plan:
        ports.append(instance.port)
        ports.extend(range(instance.side_channel_port, instance.side_channel_port + instance.side_channel_ports))
    assert len(set(ports)) == len(ports)
    assert all(1 <= p <= 65535 for p in ports)
    assert len(planned_ports(deployment, plan, Platform.QAIC)) == len(ports)


def test_a_plan_needs_counts_that_agree() -> None:
    """The plan refuses what the checks refuse."""
    with pytest.raises(ConfigError, match="2 device groups and 1 port"):
        plan_instances(topology(prefill={"device_groups": ["0", "1"], "ports": [1]}))


def test_one_group_for_several_ports_tells_how_groups_are_separated() -> None:
    """A comma inside a group is the likely slip."""
    with pytest.raises(ConfigError, match="separate the groups of several instances by spaces"):
        pool_size(Pool(device_groups=("0,1",), ports=(1, 2)), Stage.PREFILL)


@pytest.mark.parametrize(
    ("pools", "name"),
    [
        ({}, "1P1D"),
        ({"prefill": {"replicas": 2}}, "2P1D"),
        ({"encode": {}, "prefill": None, "decode": {"replicas": 2}}, "1E2PD"),
        ({"encode": {}, "prefill": {"replicas": 2}}, "1E2P1D"),
        ({"prefill": None, "decode": None, "colocated": {"replicas": 2}}, "2PD"),
        ({"colocated": {}}, "1P1D+1PD"),
    ],
)
def test_shapes_have_the_names_of_the_field(pools: dict[str, Any], name: str) -> None:
    """xPyD, xEyPD, xEyPzD."""
    deployment = topology(**pools)
    assert shape_name(deployment, plan_instances(deployment)) == name


def test_devices_that_do_not_exist_and_ports_that_are_taken_are_told_together() -> None:
    """One look at the machine finds everything."""
    deployment = topology(prefill={"device_groups": ["0..3"]}, decode={"device_groups": ["1"]})
    facts = MachineFacts(frozenset({0, 1}), {8000: "nginx (pid 7)", 9900: "", 5601: ""})
    found = check_machine(deployment, plan_instances(deployment), Platform.CPU, facts)
    assert [str(p) for p in found] == [
        "prefill.device_groups.0: this machine has no CPU cores 2,3; it has 0,1",
        "port: port 8000 is taken by nginx (pid 7); choose another",
        "prefill.ports.0: port 9900 is taken; choose another",
        "link.side_channel_port: port 5601 is taken; choose another",
    ]


def test_what_could_not_be_listed_is_not_checked() -> None:
    """Unknown devices are no missing devices; emulated ones need not exist; the hand-off port is qaic's."""
    deployment = topology(prefill={"device_groups": ["0"]}, decode={"device_groups": ["1"]})
    plan = plan_instances(deployment)
    assert check_machine(deployment, plan, Platform.CPU, MachineFacts(None, {5656: ""})) == []
    assert check_machine(deployment, plan, Platform.EMULATED, MachineFacts(frozenset())) == []
    assert len(check_machine(deployment, plan, Platform.QAIC, MachineFacts(None, {5656: ""}))) == 1
    assert "it has none" in str(check_machine(deployment, plan, Platform.CUDA, MachineFacts(frozenset()))[0])
