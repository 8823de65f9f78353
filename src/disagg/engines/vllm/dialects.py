"""The handoff dialects of vLLM by name, and the facts that they need about an instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagg.engines.base import Dialect, Peer
from disagg.engines.settings import stage_settings
from disagg.engines.vllm.dialect_lmcache import LMCacheDialect
from disagg.engines.vllm.dialect_mooncake import MooncakeDialect
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.engines.vllm.dialect_push import PushDialect
from disagg.topology.instances import Instance
from disagg.topology.spec import Topology

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "auto": PullDialect,
    "nixl-pull": PullDialect,
    "nixl-push": PushDialect,
    "mooncake": MooncakeDialect,
    "lmcache": LMCacheDialect,
}
"""By `link.dialect`."""


def peer(topology: Topology, instance: Instance, incarnation: str) -> Peer:
    """What other engines have to be told about one start of an instance."""
    settings = stage_settings(topology, instance.stage)
    shape = settings.parallel
    return Peer(
        engine_id=incarnation,
        host=settings.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", reachable(instance.host)),
        side_channel_port=instance.side_channel_port,
        alloc_port=instance.side_channel_port + shape.tensor,
        bootstrap_port=instance.bootstrap_port,
        tensor=shape.tensor,
        pipeline=shape.pipeline,
        data=shape.data,
    )


def reachable(host: str) -> str:
    """An address that peers on this machine can connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
