"""Which handoff dialects vLLM has on a platform, and what each of them needs."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engines.findings import Findings, error, warning
from disagg.engines.settings import stage_settings
from disagg.engines.vllm.dialects import DIALECTS
from disagg.engines.vllm.transfer import NIXL
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Stage, Topology

_WHERE = "link.dialect"
_NIXL_FIELDS = ("lease_s", "side_channel_port")
_CONFIG_FILE = "LMCACHE_CONFIG_FILE"


def findings(topology: Topology, instances: Sequence[Instance]) -> Findings:
    """What does not work, or is not tested, with the chosen dialect."""
    name = topology.link.dialect
    if name not in DIALECTS:
        known = ", ".join(d for d in DIALECTS if d != "auto")
        yield error(_WHERE, f"{name} is not a dialect of vLLM; choose one of {known}")
        return
    if name in {"auto", "nixl-pull"}:
        return
    link = topology.link
    if name not in NIXL:
        if topology.platform is Platform.CPU:
            yield error(_WHERE, f"{name} moves KV between GPUs; on cpu choose nixl-pull or nixl-push")
        if link.transport == "nixl":
            yield error("link.transport", f"{name} has a transport of its own; leave it at auto")
        for field in _NIXL_FIELDS:
            if field in link.model_fields_set and not (name == "lmcache" and field == "side_channel_port"):
                yield warning(f"link.{field}", f"has no effect with {name}")
        yield warning(_WHERE, f"{name} is rendered from its documents, but not tested here: no GPU was at hand")
    if name == "lmcache":
        yield from _lmcache(topology, instances)


def _lmcache(topology: Topology, instances: Sequence[Instance]) -> Findings:
    receivers = [i for i in instances if i.stage is Stage.DECODE]
    if len(receivers) > 1:
        yield error(
            "decode.replicas",
            "LMCache reads a decode instance's receiver ports from a file, which a pool has one of; use one decode "
            "instance, or start the engines yourself",
        )
    for stage in (Stage.PREFILL, Stage.DECODE):
        if _CONFIG_FILE in stage_settings(topology, stage).env:
            continue
        role = "sender" if stage is Stage.PREFILL else "receiver"
        ports = ""
        if stage is Stage.DECODE and receivers:
            first, tensor = receivers[0].side_channel_port, stage_settings(topology, stage).parallel.tensor
            ports = f", pd_peer_init_port {first} and pd_peer_alloc_port {first + tensor}"
        yield error(
            f"{stage}.env.{_CONFIG_FILE}",
            f"LMCache takes its settings from a file: name it here, with enable_pd, pd_role {role}{ports} in it",
        )
