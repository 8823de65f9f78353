"""Command lines, environment and hand-off service of a Cloud AI deployment, as the public documents have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from pydantic import JsonValue

from disagg.engines.base import FlagTable, StartContext, python_module
from disagg.engines.flag_list import read_flags
from disagg.engines.qaic.stage import DRAFT_KEY, MXINT8_NAMES, StagePlan, plan, rank, role
from disagg.topology.instances import Instance
from disagg.topology.spec import Stage, Topology

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
HANDOFF_MODULE = "qaic_disagg.kv_handoff.server"

RESERVED = MappingProxyType(
    {
        "model": "use --model; all stages need the same one",
        "served-model-name": "use --served-model-name for all stages",
        "host": "use --host; engines follow it",
        "port": "use the stage's ports (--prefill-port, --decode-port)",
        "uds": "engines are reached by port",
        "config": "a second configuration file would not be checked; put its flags into engine_args",
        "kv-transfer-config": "prefill is kv_producer and decode kv_consumer; the connector refuses kv_both",
        "ec-transfer-config": "the encode stage sets it",
        "additional-config": "use override_qaic_config, and draft_override_qaic_config in speculative_config",
        "speculative-config": "use decode.speculative_config (--decode-speculative-config)",
        "tensor-parallel-size": "the size of the device group is the tensor-parallel size",
        "pipeline-parallel-size": "use stages in prefill.override_qaic_config",
        "data-parallel-size": "use replicas",
        "api-key": "a key belongs to the router, which clients talk to",
        "hf-token": "command lines are visible to every user of a machine; export HF_TOKEN instead",
        "disable-log-stats": "the router reads the engine's metrics",
        "headless": "without its HTTP server the router cannot reach an engine",
        "api-server-count": "one server per engine; add replicas instead",
        "ssl-certfile": "engines are reached through the router only; TLS belongs in front of it",
        "ssl-keyfile": "engines are reached through the router only; TLS belongs in front of it",
    }
)
"""Flags that users may not pass through, with what to use instead."""

# What the KV cache is called on a command line; fp16 is what this platform takes for auto.
_KV_DTYPES = {"auto": "auto", "fp16": "auto", "float16": "auto"} | dict.fromkeys(MXINT8_NAMES, "mxint8")


@cache
def flag_table() -> FlagTable:
    """vLLM's flags: this platform is a plug-in of vLLM and takes the same ones."""
    version, flags = read_flags((files("disagg.engines.vllm") / "flags.json").read_bytes())
    return FlagTable(engine=f"vLLM {version} with vllm-qaic", flags=MappingProxyType(flags), reserved=RESERVED)


def argv(topology: Topology, instance: Instance, context: StartContext) -> tuple[str, ...]:
    """The OpenAI server of one instance."""
    stage = plan(topology, instance)
    flags: dict[str, JsonValue] = {
        "model": context.model,
        "served-model-name": list(context.served_model_names),
        "host": instance.host,
        "port": instance.port,
        **_stage_flags(topology, instance, stage),
    }
    side = role(topology, instance.stage)
    if side is not None:
        flags["kv-transfer-config"] = {
            "kv_connector": "QaicConnector",
            "kv_role": side,
            "kv_rank": rank(topology, instance),
            "kv_ip": instance.host,
            "kv_port": topology.link.handoff_port,
        }
        flags["enable-prefix-caching"] = False
    flags.update(stage.settings.engine_args)
    words = [*python_module(SERVER_MODULE)]
    for name, value in flags.items():
        words.extend(_words(name, value))
    return tuple(words)


def environment(topology: Topology, instance: Instance) -> dict[str, str]:
    """Variables on top of the launcher's own, from which HF_HOME, HF_TOKEN and QEFF_HOME are inherited."""
    stage = plan(topology, instance)
    env = {"VLLM_LOGGING_LEVEL": "DEBUG" if topology.verbosity >= 2 else "INFO", **stage.settings.env}
    # A draft on a device of its own has to see it as well. The order of the target's group is kept.
    visible = dict.fromkeys((*instance.devices, *(stage.draft.devices if stage.draft is not None else ())))
    if visible:
        env["QAIC_VISIBLE_DEVICES"] = ",".join(map(str, visible))
    return env


def handoff_argv(topology: Topology) -> tuple[str, ...]:
    """The service in which prefill and decode meet."""
    link = topology.link
    words = [*python_module(HANDOFF_MODULE), "--port", str(link.handoff_port)]
    size = link.handoff_store_mb if link.handoff_store_mb is not None else link.handoff_store_entries
    if size is not None:
        words += ["--size", str(size)]
    return tuple(words)


def _stage_flags(topology: Topology, instance: Instance, stage: StagePlan) -> dict[str, JsonValue]:
    settings = stage.settings
    dtype = settings.kv_cache_dtype
    additional: dict[str, JsonValue] = {"override_qaic_config": dict(stage.override.config)}
    if stage.draft is not None:
        additional[DRAFT_KEY] = dict(stage.draft.override.config)
    flags: dict[str, JsonValue] = {
        # An encoder has no tokens to make: it is a pooling model that returns embeddings.
        "runner": "pooling" if instance.stage is Stage.ENCODE else None,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "long-prefill-token-threshold": settings.max_seq_len_to_capture,
        "kv-cache-dtype": _KV_DTYPES.get(dtype, dtype) if dtype is not None else None,
        "block-size": settings.block_size,
        "quantization": settings.quantization,
        "generation-config": topology.generation_config,
        "seed": topology.seed,
        "speculative-config": stage.speculation.config if stage.speculation is not None else None,
        "additional-config": additional,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _words(name: str, value: JsonValue) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    if isinstance(value, list):
        return (f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in value))
    return (f"--{name}", value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
