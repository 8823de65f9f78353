"""Policies by name. The list is here, to be read at one glance; the command line takes its choices from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from disagg.errors import ConfigError, Problem
from disagg.policy.balance import LeastLoaded, PowerOfTwo, Random, RoundRobin
from disagg.policy.base import Need, Policy
from disagg.policy.cache import CacheAffinity
from disagg.policy.session import SessionAffinity

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "random": Random,
        "least-loaded": LeastLoaded,
        "power-of-two": PowerOfTwo,
        "session-affinity": SessionAffinity,
        "prefix-affinity": lambda: CacheAffinity(Need.SENT_PREFIX),
        "kv-affinity": lambda: CacheAffinity(Need.HELD_BLOCKS),
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
