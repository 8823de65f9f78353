"""Every port of a deployment, looked at before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from disagg.engines.base import PlannedProcess
from disagg.errors import ConfigError, Problem
from disagg.launch import procfs


def check_ports(processes: Sequence[PlannedProcess], endpoint: Mapping[str, int] | None = None) -> None:
    """Make sure that every planned port is planned once and is free now.

    A process that another program keeps from its port would hang or die minutes later, and two instances that
    share a side channel would read each other's KV; so all ports of all processes are tried at once.

    Args:
        processes: What is going to start.
        endpoint: Further ports of this program itself, by purpose.

    Raises:
        ConfigError: Naming every port that is taken, by whom, and every port that is planned twice.
    """
    users: dict[int, list[str]] = {}
    for purpose, port in (endpoint or {}).items():
        users.setdefault(port, []).append(purpose)
    for process in processes:
        for purpose, port in process.ports.items():
            users.setdefault(port, []).append(f"{process.name} {purpose}")
    taken = taken_ports(users)
    problems = [
        Problem(", ".join(names), f"port {port} is planned for each of them; give them different ports")
        for port, names in sorted(users.items())
        if len(names) > 1
    ]
    problems += [
        Problem(users[port][0], f"port {port} is taken by {owner}; choose another one or stop what uses it")
        for port, owner in sorted(taken.items())
    ]
    if problems:
        raise ConfigError(problems)


@contextmanager
def reserved_ports(processes: Sequence[PlannedProcess]) -> Iterator[None]:
    """Keep the planned ports from everybody but the processes that they are planned for.

    An engine opens its side channel half a minute after its start. Until then the system may give the port to any
    program's outgoing connection, and vLLM's handshake listener, which then cannot bind, leaves its engine waiting
    for ever. A socket that is bound but does not listen prevents that on Linux, and does not hinder the process that
    listens there with SO_REUSEADDR, as engines do; it also keeps the port while an engine restarts.

    Args:
        processes: What is going to start.

    Raises:
        ConfigError: Naming every port that was taken after it had been looked at.
    """
    with ExitStack() as stack:
        problems: list[Problem] = []
        for process in processes:
            for purpose, port in process.ports.items():
                holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                error = _bind(holder, port)
                if error is not None:
                    problems.append(Problem(f"{process.name} {purpose}", f"port {port} cannot be had: {error}"))
        if problems:
            raise ConfigError(problems)
        yield


def taken_ports(ports: Iterable[int]) -> dict[int, str]:
    """Which of the ports cannot be listened on now.

    Returns:
        Port to what has it: ``pid 4711 (python3)``, or less where this user may not know.
    """
    errors = {port: error for port in sorted(set(ports)) if (error := _bind_error(port)) is not None}
    owners = procfs.listeners([port for port, error in errors.items() if error.errno == errno.EADDRINUSE])
    taken: dict[int, str] = {}
    for port, error in errors.items():
        if port in owners:
            taken[port] = "pid {} ({})".format(*owners[port])
        else:
            taken[port] = "another process" if error.errno == errno.EADDRINUSE else f"the system ({error.strerror})"
    return taken


def _bind_error(port: int) -> OSError | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return _bind(probe, port)


def _bind(holder: socket.socket, port: int) -> OSError | None:
    """Take the wildcard address: it clashes with a listener on any address of this machine."""
    # As servers do: connections of an earlier run that linger in TIME_WAIT are no obstacle.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("0.0.0.0", port))  # noqa: S104 - bound, never listened on
    except OSError as error:
        return error
    return None
