"""What decides where requests go, put together: the policies, their facts, and what watches the engines for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from disagg.errors import ConfigError, Problem
from disagg.http.client import Client
from disagg.http.messages import Header
from disagg.policy.base import Need, Policy
from disagg.policy.kv_index import KvIndex
from disagg.policy.registry import make_policy
from disagg.router.affinity import Affinity
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet
from disagg.router.loads import Loads
from disagg.router.series import Gauge, Series
from disagg.router.tokens import Tokens
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

if TYPE_CHECKING:
    from disagg.router.kv_events import KvFeed


class Steering:
    """Runs what the policies of a deployment need, and nothing if they need nothing.

    Args:
        config: Of the router.
        fleet: Who is there.
        client: Connections to the engines.
        clocks: Where time comes from.
        headers: Credentials that the engines want from us.

    Attributes:
        affinity: The policies and their facts.

    Raises:
        ConfigError: If a policy needs what these engines or this installation do not have.
    """

    def __init__(
        self, config: RouterConfig, fleet: Fleet, client: Client, clocks: Clocks, headers: tuple[Header, ...]
    ) -> None:
        spec = config.spec
        self._tokens = Tokens(fleet, client, config.served_model_names, clocks.monotonic)
        self._threshold = spec.local_prefill_tokens
        self.affinity = Affinity(_policies(spec), spec, fleet, self._tokens)
        self._loads: Loads | None = None
        if config.probe is not None and spec.load_interval_s and self.affinity.needs(Need.LOAD):
            self._loads = Loads(fleet, client, config.probe, spec.load_interval_s, clocks.monotonic)
            self._loads.headers = headers
        self._feed: KvFeed | None = None
        listening = self.affinity.needs(Need.HELD_BLOCKS)
        if listening:
            path = config.probe.kv_events_path if config.probe is not None else None
            self._feed = _kv_feed(fleet, listening, client, path, self.affinity.kv_index)
            self._feed.headers = headers

    async def start(self) -> None:
        """Begin to watch the engines."""
        if self._loads is not None:
            self._loads.start()
        if self._feed is not None:
            self._feed.start()

    async def stop(self) -> None:
        """Watch no more."""
        if self._loads is not None:
            await self._loads.stop()
        if self._feed is not None:
            await self._feed.stop()

    def series(self) -> tuple[Series, ...]:
        """What there is to see of it."""
        threshold = Gauge(
            "disagg_local_prefill_threshold_tokens",
            "Prompts with fewer uncached tokens are prefilled where they are decoded; 0 hands all over.",
            (),
            lambda: [((), self._threshold)],
        )
        shown: list[Series] = [threshold, *self.affinity.series()]
        if self._loads is not None:
            shown += self._loads.series()
        if self._feed is not None:
            shown += [*self._feed.series(), *self._tokens.series()]
        return tuple(shown)


def _kv_feed(fleet: Fleet, stages: Sequence[Stage], client: Client, path: str | None, index: KvIndex) -> KvFeed:
    where = ", ".join(f"router.{'prefill' if s is Stage.PREFILL else 'decode'}_policy" for s in stages)
    if path is None:
        raise ConfigError([Problem(where, "kv-affinity needs engines that publish KV events, and these do not")])
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError([Problem(where, "kv-affinity needs pyzmq; install disagg[kv-events]")])
    from disagg.router.kv_events import KvFeed

    return KvFeed(fleet, stages, client, path, index)


def _policies(spec: RouterSpec) -> dict[Stage, Policy]:
    return {
        Stage.ENCODE: make_policy(spec.encode_policy, "router.encode_policy"),
        Stage.PREFILL: make_policy(spec.prefill_policy, "router.prefill_policy"),
        Stage.DECODE: make_policy(spec.decode_policy, "router.decode_policy"),
        Stage.COLOCATED: make_policy(spec.decode_policy, "router.decode_policy"),
    }
