"""What is the same for all requests of a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.engines.base import Dialect
from disagg.router.introduction import Introductions
from disagg.router.legs import Legs
from disagg.router.prefix_caches import PrefixCaches
from disagg.router.release import Releases
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage


@dataclass(frozen=True, slots=True)
class Route:
    """What a request needs of its router.

    Attributes:
        legs: Chooses instances and sends legs.
        dialect: How legs are written.
        spec: Limits and modes.
        max_handle_age_s: A handle that is older is not used.
        lease_s: How long prefill keeps KV that nobody fetches.
        linger_s: How long a decode leg whose client has left may go on for its first output.
        serving: The stage that answers: decode, or colocated.
        releases: Lets KV go that nobody will fetch.
        introductions: What has to be known of prefill instances.
        caches: What is known of the decode instances' prefix caches.
        new_key: 32 hex digits that no client can guess, for the transfer of one attempt.
    """

    legs: Legs
    dialect: Dialect
    spec: RouterSpec
    max_handle_age_s: float
    lease_s: float
    linger_s: float
    serving: Stage
    releases: Releases
    introductions: Introductions
    caches: PrefixCaches
    new_key: Callable[[], str]
