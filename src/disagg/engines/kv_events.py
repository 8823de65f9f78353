"""Which engines publish what their KV caches hold, and where."""

from __future__ import annotations

from pydantic import JsonValue

from disagg.topology.spec import Stage, Topology

FLAG = "kv-events-config"
_POLICY = "kv-affinity"


def listens(topology: Topology, stage: Stage) -> bool:
    """Whether the policy of a stage looks at KV events."""
    router = topology.router
    policies = {Stage.PREFILL: router.prefill_policy, Stage.ENCODE: router.encode_policy}
    return policies.get(stage, router.decode_policy) == _POLICY


def events_config(topology: Topology, stage: Stage, run_dir: str) -> JsonValue:
    """The value of vLLM's ``--kv-events-config`` for an instance of a stage, or None if nobody listens.

    Events tell the tokens of prompts, so they go through sockets in the instance's private directory: the engine can
    bind a TCP port only on all addresses. It counts its data-parallel ranks up in names that hold ``inproc``, and
    refuses to in others that are no TCP ones.

    Args:
        topology: The deployment.
        stage: Of the instance.
        run_dir: Private directory of this start.
    """
    if not listens(topology, stage):
        return None
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{run_dir}/inproc-kv",
        "replay_endpoint": f"ipc://{run_dir}/inproc-kv-replay",
    }
