"""The flags of vLLM, read from the list that `dump_flags` made of them, and those that are not the user's to set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from disagg.engines.base import FlagTable
from disagg.engines.flag_list import read_flags

_LOCAL_ONLY = "an instance runs on one host here; spread a stage with replicas"
_TLS = "engines are reached through the router only; TLS belongs in front of it"
_SPECULATION = "use the stage's speculative_config (--decode-speculative-config)"

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use --model; all stages need the same one",
        "served-model-name": "use --served-model-name for all stages",
        "host": "use --host; engines follow it",
        "port": "use the stage's ports (--prefill-port, --decode-port)",
        "uds": "engines are reached by port",
        "root-path": "paths are the router's",
        "config": "a second configuration file would not be checked; put its flags into engine_args",
        "kv-transfer-config": "use link, which is the same for both sides",
        "ec-transfer-config": "the encode stage sets it",
        "kv-offloading-backend": "it would replace the connector that moves KV to decode",
        "kv-offloading-size": "it would replace the connector that moves KV to decode",
        "speculative-config": _SPECULATION,
        "spec-method": _SPECULATION,
        "spec-model": _SPECULATION,
        "spec-tokens": _SPECULATION,
        "tensor-parallel-size": "use the stage's parallel.tensor",
        "pipeline-parallel-size": "use the stage's parallel.pipeline",
        "data-parallel-size": "use the stage's parallel.data",
        "enable-expert-parallel": "use the stage's parallel.expert",
        "decode-context-parallel-size": "use the stage's parallel.context",
        "prefill-context-parallel-size": "use the stage's parallel.context",
        "device-ids": "use the stage's device_groups",
        "api-key": "a key belongs to the router, which clients talk to",
        "hf-token": "command lines are visible to every user of a machine; export HF_TOKEN instead",
        "disable-log-stats": "the router and the readiness check read the engine's metrics",
        "headless": "without its HTTP server the router cannot reach an engine",
        "tokens-only": "the router speaks the OpenAI API to an engine",
        "grpc": "the router speaks HTTP to an engine",
        "grpc-port": "the router speaks HTTP to an engine",
        "api-server-count": "one server per engine; add replicas instead",
        "data-parallel-address": _LOCAL_ONLY,
        "data-parallel-backend": _LOCAL_ONLY,
        "data-parallel-external-lb": _LOCAL_ONLY,
        "data-parallel-hybrid-lb": _LOCAL_ONLY,
        "data-parallel-multi-port-external-lb": _LOCAL_ONLY,
        "data-parallel-rank": _LOCAL_ONLY,
        "data-parallel-rpc-port": _LOCAL_ONLY,
        "data-parallel-size-local": _LOCAL_ONLY,
        "data-parallel-start-rank": _LOCAL_ONLY,
        "data-parallel-supervisor-port": _LOCAL_ONLY,
        "master-addr": _LOCAL_ONLY,
        "master-port": _LOCAL_ONLY,
        "nnodes": _LOCAL_ONLY,
        "node-rank": _LOCAL_ONLY,
        "ssl-ca-certs": _TLS,
        "ssl-cert-reqs": _TLS,
        "ssl-certfile": _TLS,
        "ssl-ciphers": _TLS,
        "ssl-keyfile": _TLS,
        "enable-ssl-refresh": _TLS,
    }
)
"""Flags that users may not pass through, with what to use instead."""


@cache
def flag_table() -> FlagTable:
    """The flags of the vLLM version that this adapter was made for."""
    version, flags = read_flags((files("disagg.engines.vllm") / "flags.json").read_bytes())
    return FlagTable(engine=f"vLLM {version}", flags=MappingProxyType(flags), reserved=RESERVED)
