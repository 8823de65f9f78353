"""The command line of one vLLM engine: typed fields of the topology first, the user's own engine flags over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from disagg.engines.base import FlagSpec, StartContext, python_module
from disagg.engines.kv_events import FLAG as EVENTS_FLAG
from disagg.engines.kv_events import events_config
from disagg.engines.settings import StageSettings, flag_path, stage_settings
from disagg.engines.speculation import translate
from disagg.engines.vllm.environment import COMPILATION_FLAGS, KV_CACHE_GIB, without_worker
from disagg.engines.vllm.transfer import transfer_config
from disagg.topology.effective import stage_path
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Stage, Topology

Flags = dict[str, JsonValue]

# The package's console script does not start in its CPU build, so the server module is run instead.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

KV_CACHE_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""KV cache formats of a topology that vLLM has, and its names for them."""

TYPED_FLAGS: Mapping[str, str] = {
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "max-model-len": "max_model_len",
    "long-prefill-token-threshold": "max_seq_len_to_capture",
    "kv-cache-dtype": "kv_cache_dtype",
    "block-size": "block_size",
    "quantization": "quantization",
}
"""vLLM flags that a field of the topology sets, with that field's name."""

DEFAULT_CPU_KV_CACHE_BYTES = 1024**3
"""KV cache of an engine on CPU, if the user sets none. vLLM's own default takes most of the machine's memory."""


def stage_flags(topology: Topology, stage: Stage) -> Flags:
    """Flags that every instance of a stage gets, in the order of the command line; nulls are left out."""
    settings = stage_settings(topology, stage)
    flags: Flags = {
        # Without it vLLM answers tokens-in requests and aborts with 403.
        "enable-scale-out": True,
        **_typed(topology, settings),
        **_parallel(settings),
        **_verbosity(topology.verbosity),
    }
    if topology.platform is Platform.CPU:
        flags |= _cpu_defaults(topology, settings)
    flags.update(settings.engine_args)
    return {name: value for name, value in flags.items() if value is not None}


def argv(
    topology: Topology, instance: Instance, context: StartContext, known: Mapping[str, FlagSpec]
) -> tuple[str, ...]:
    """The whole command line of an instance.

    Args:
        topology: The deployment, checked.
        instance: The instance to start.
        context: What changes from start to start.
        known: The engine's flags, which tell how a value is written.
    """
    flags: Flags = {
        "model": context.model,
        "served-model-name": list(context.served_model_names),
        "host": instance.host,
        "port": instance.port,
        **stage_flags(topology, instance.stage),
    }
    events = events_config(topology, instance.stage, context.run_dir)
    if events is not None:
        # A user's own configuration is as good: the engine tells where it publishes.
        flags.setdefault(EVENTS_FLAG, events)
    transfer = transfer_config(topology, instance.stage, context.incarnation)
    if transfer is not None:
        flags["kv-transfer-config"] = transfer
    words = [*python_module(SERVER_MODULE)]
    for name, value in flags.items():
        words.extend(flag_words(name, value, known.get(name)))
    return tuple(words)


def flag_words(name: str, value: JsonValue, spec: FlagSpec | None) -> list[str]:
    """One flag as it stands on the command line; a false one by its ``--no-`` twin."""
    if isinstance(value, bool) and (spec is None or spec.kind == "bool"):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list) and (spec is None or spec.kind != "json"):
        return [f"--{name}", *(_word(item) for item in value)]
    return [f"--{name}", _word(value)]


def _word(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _typed(topology: Topology, settings: StageSettings) -> Flags:
    kv_dtype = settings.kv_cache_dtype
    speculative = settings.speculative_config
    flags: dict[str, Any] = {
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "max-num-batched-tokens": settings.max_num_batched_tokens,
        "long-prefill-token-threshold": settings.max_seq_len_to_capture,
        "kv-cache-dtype": KV_CACHE_DTYPES.get(kv_dtype, kv_dtype) if kv_dtype is not None else None,
        "block-size": settings.block_size,
        "quantization": settings.quantization,
        "speculative-config": translate(speculative).config if speculative is not None else None,
        "generation-config": topology.generation_config,
        "seed": topology.seed,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _cpu_defaults(topology: Topology, settings: StageSettings) -> Flags:
    flags: Flags = {}
    if not any(flag in settings.engine_args for flag in COMPILATION_FLAGS):
        # Compiling takes minutes, for a step that is a tenth shorter with a small model.
        flags["enforce-eager"] = True
    if KV_CACHE_GIB not in settings.env:
        flags["kv-cache-memory-bytes"] = DEFAULT_CPU_KV_CACHE_BYTES
    if without_worker(topology, settings):
        flags["distributed-executor-backend"] = "uni"
    return flags


def _parallel(settings: StageSettings) -> Flags:
    shape = settings.parallel
    flags: Flags = {}
    if shape.tensor > 1:
        flags["tensor-parallel-size"] = shape.tensor
    if shape.pipeline > 1:
        flags["pipeline-parallel-size"] = shape.pipeline
    if shape.data > 1:
        flags["data-parallel-size"] = shape.data
    if shape.expert > 1:
        flags["enable-expert-parallel"] = True
    return flags


def _verbosity(level: int) -> Flags:
    # The router's own log tells about requests. Statistics are never switched off: /metrics needs them.
    if level == 0:
        return {"disable-uvicorn-access-log": True}
    if level == 1:
        return {"disable-access-log-for-endpoints": "/health,/metrics"}
    return {"enable-log-requests": True}


def where_set(topology: Topology, stage: Stage, flag: str) -> str:
    """Where the value of a flag comes from: the user's own flag if there is one, else the field that sets it."""
    if flag in stage_settings(topology, stage).engine_args:
        return flag_path(topology, stage, flag)
    return stage_path(topology, stage, TYPED_FLAGS.get(flag, flag))


def whole(flags: Flags, name: str) -> int | None:
    """A flag's value as a whole number; None if it is absent or written in another way, such as 16k."""
    value = flags.get(name)
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None
