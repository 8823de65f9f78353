"""Policies by name. The list is here, to be read at one glance; the command line takes its choices from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from disagg.errors import ConfigError, Problem
from disagg.policy.balance import LeastLoaded, RoundRobin
from disagg.policy.base import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
    }
)


def make_policy(name: str, where: str = "policy") -> Policy:
    """Build a policy.

    Args:
        name: A key of `POLICIES`.
        where: The flag or file path that the name came from, for the message.

    Raises:
        ConfigError: If there is no policy of that name.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError([Problem(where, f"unknown policy {name!r}; known are {', '.join(sorted(POLICIES))}")])
    return factory()
