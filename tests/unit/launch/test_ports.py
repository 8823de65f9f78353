"""`disagg.launch.ports`: conflicts are found before anything starts."""

from __future__ import annotations

import os
import socket

import pytest

from disagg.engines.base import PlannedProcess
from disagg.errors import ConfigError
from disagg.launch.ports import check_ports, reserved_ports, taken_ports
from tests.support.launch_fakes import free_port


def process(name: str, **ports: int) -> PlannedProcess:
    return PlannedProcess(name, ("x",), ports=ports)


def test_free_ports_pass() -> None:
    """Nothing is said, and the ports are free afterwards."""
    port = free_port()
    check_ports([process("prefill-0", http=port)])
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_every_taken_and_every_doubled_port_is_named_at_once() -> None:
    """One message has all conflicts, with instance, purpose, and the process that has the port."""
    doubled = free_port()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        first, second = one.getsockname()[1], two.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_ports(
                [process("prefill-0", http=first, side=doubled), process("decode-0", http=second, side=doubled)],
            )
    said = {p.where: p.message for p in caught.value.problems}
    assert f"port {doubled}" in said["prefill-0 side, decode-0 side"]
    assert f"port {first} is taken by pid {os.getpid()}" in said["prefill-0 http"]
    assert f"port {second} is taken by pid {os.getpid()}" in said["decode-0 http"]


def test_the_endpoint_is_part_of_the_plan() -> None:
    """An instance may not take the router's port."""
    port = free_port()
    with pytest.raises(ConfigError, match="the endpoint, decode-0 http"):
        check_ports([process("decode-0", http=port)], {"the endpoint": port})


def test_a_listener_on_another_address_counts() -> None:
    """A port that somebody has on all addresses, or on one, is not free for an engine."""
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        assert list(taken_ports([port])) == [port]


def test_closed_connections_of_an_earlier_run_are_no_obstacle() -> None:
    """TIME_WAIT does not keep an engine from its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
    assert taken_ports([port]) == {}


def test_a_reserved_port_is_for_its_engine_alone() -> None:
    """Until its engine listens there, the system gives it to no other socket, and the engine can still have it."""
    with socket.create_server(("127.0.0.1", 0)) as peer:
        port = free_port_unreserved()
        with reserved_ports([process("prefill-0", side=port)]):
            with pytest.raises(OSError, match="in use"):
                socket.create_connection(peer.getsockname(), source_address=("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as engine:
                socket.create_connection(engine.getsockname()).close()
        with socket.create_connection(peer.getsockname(), source_address=("127.0.0.1", port)) as outgoing:
            assert outgoing.getsockname()[1] == port


def test_a_reserved_port_is_still_its_engines_after_a_restart() -> None:
    """Connections of the engine's earlier start are no obstacle for the next one."""
    port = free_port_unreserved()
    with reserved_ports([process("prefill-0", http=port)]):
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as engine:
                client = socket.create_connection(engine.getsockname())
                accepted, _ = engine.accept()
                accepted.close()
                client.close()


def test_a_port_that_was_taken_in_between_is_named() -> None:
    """What got the port after the look at all ports is an error of the configuration like before it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} cannot be had"),
            reserved_ports([process("d", http=port)]),
        ):
            pytest.fail("it was taken")


def free_port_unreserved() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
