"""`--kv-transfer-config`: whether an instance hands KV over, and how."""

from __future__ import annotations

from pydantic import JsonValue

from disagg.topology.spec import Platform, Stage, Topology

NIXL = frozenset({"auto", "nixl-pull", "nixl-push"})
"""Dialects that NIXL moves the bytes for."""

_CONNECTORS = {
    "auto": "NixlConnector",
    "nixl-pull": "NixlConnector",
    "nixl-push": "NixlPushConnector",
    "mooncake": "MooncakeConnector",
    "lmcache": "LMCacheConnectorV1",
}
_ROLES = {Stage.PREFILL: "kv_producer", Stage.DECODE: "kv_consumer"}


def hands_over(topology: Topology) -> bool:
    """Whether prompts are computed by one pool and continued by another."""
    return topology.prefill is not None and topology.decode is not None


def transfer_config(topology: Topology, stage: Stage, incarnation: str) -> dict[str, JsonValue] | None:
    """The connector of one instance; None if it neither gives nor takes KV.

    Args:
        topology: The deployment.
        stage: The instance's stage.
        incarnation: Unique to this start of the instance. vLLM puts it into every handle as ``remote_engine_id``,
            and a decode engine looks prefill engines up by it, so a restarted one is never taken for its predecessor.
    """
    role = _ROLES.get(stage)
    if role is None or not hands_over(topology):
        return None
    config: dict[str, JsonValue] = {
        "kv_connector": _CONNECTORS[topology.link.dialect],
        "kv_role": role,
        "engine_id": incarnation,
        "kv_load_failure_policy": topology.link.on_failure,
    }
    if topology.link.dialect in NIXL:
        # Whole seconds: vLLM derives heartbeat and extension by integer division.
        config["kv_connector_extra_config"] = {"kv_lease_duration": int(topology.link.lease_s)}
    if topology.platform is Platform.CPU:
        config["kv_buffer_device"] = "cpu"
    return config
