"""What vLLM would refuse at start, or silently get wrong: found before anything starts, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from disagg.engines.base import FlagTable
from disagg.engines.findings import Findings, error, shown, split, warning
from disagg.engines.flags import flag_problem
from disagg.engines.settings import StageSettings, flag_path, stage_settings
from disagg.engines.speculation import translate
from disagg.engines.vllm import dialect_checks, environment, pair
from disagg.engines.vllm.command import KV_CACHE_DTYPES, TYPED_FLAGS, stage_flags, where_set, whole
from disagg.engines.vllm.speculation import faults
from disagg.engines.vllm.transfer import hands_over
from disagg.errors import Problem
from disagg.topology.effective import stage_path
from disagg.topology.instances import Instance
from disagg.topology.secrets import is_secret
from disagg.topology.spec import Platform, Stage, Topology
from disagg.units import format_id_group

CPU_BLOCK_TOKENS = 32
"""vLLM's attention on CPU works on this many tokens at once."""


def check(topology: Topology, instances: Sequence[Instance], table: FlagTable) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of a topology on vLLM, each once, in the order of the topology."""
    return split(_findings(topology, instances, table))


def _findings(topology: Topology, instances: Sequence[Instance], table: FlagTable) -> Findings:
    yield from _features(topology)
    for stage in topology.stages():
        settings = stage_settings(topology, stage)
        yield from _formats(topology, stage, settings)
        yield from _limits(topology, stage, settings)
        yield from _shape(stage, settings)
        yield from _engine_args(topology, stage, settings, table)
        yield from _env(topology, stage, settings)
    for instance in instances:
        yield from _devices(topology, instance)
    if hands_over(topology):
        yield from pair.findings(topology)
        yield from dialect_checks.findings(topology, instances)
    yield from _speculation(topology)


def _features(topology: Topology) -> Findings:
    if topology.encode is not None:
        yield error("encode", "vLLM's encode stage is not served by this release; leave the encode pool out")
    if topology.kv_store is not None:
        yield error("kv_store", "a shared KV store is not served by this release; leave it out")
    link = topology.link
    if link.transport == "shared-memory":
        yield error("link.transport", "vLLM moves KV with NIXL; choose nixl or auto (shared-memory is for qaic)")
    if link.lease_s != int(link.lease_s):
        yield error("link.lease_s", f"vLLM counts leases in whole seconds; write {int(link.lease_s) + 1}")
    for field in ("handoff_store_mb", "handoff_store_entries", "handoff_port"):
        if field in link.model_fields_set:
            yield warning(
                f"link.{field}", "has no effect on vLLM, whose prefill keeps the KV itself (qaic has a store)"
            )


def _formats(topology: Topology, stage: Stage, settings: StageSettings) -> Findings:
    dtype = settings.kv_cache_dtype
    if dtype is not None and dtype not in KV_CACHE_DTYPES:
        where = stage_path(topology, stage, "kv_cache_dtype")
        known = ", ".join(KV_CACHE_DTYPES)
        what = "is Qualcomm's format" if dtype == "mxint8" else "is no format of vLLM's KV cache"
        yield error(where, f"{dtype} {what}; on {topology.platform} choose one of {known}")
    if settings.quantization is not None and settings.quantization.startswith("mxfp6"):
        where = stage_path(topology, stage, "quantization")
        yield error(
            where, f"{settings.quantization} is Qualcomm's weight format; vLLM on {topology.platform} lacks it"
        )
    if settings.override_qaic_config is not None:
        where = stage_path(topology, stage, "override_qaic_config")
        yield error(where, f"compile settings are for platform qaic; the platform is {topology.platform}")


def _limits(topology: Topology, stage: Stage, settings: StageSettings) -> Findings:
    flags = stage_flags(topology, stage)
    tokens, seqs = whole(flags, "max-num-batched-tokens"), whole(flags, "max-num-seqs")
    length, chunk = whole(flags, "max-model-len"), whole(flags, "long-prefill-token-threshold")
    if tokens is not None and seqs is not None and tokens < seqs:
        where = where_set(topology, stage, "max-num-batched-tokens")
        yield error(where, f"{tokens} tokens a step are fewer than max_num_seqs {seqs}; each sequence needs one")
    if chunk is not None and length is not None and chunk > length:
        where = where_set(topology, stage, "long-prefill-token-threshold")
        yield error(where, f"{chunk} prompt tokens per iteration are more than max_model_len {length}")
    block = whole(flags, "block-size")
    if topology.platform is Platform.CPU and block is not None and block % CPU_BLOCK_TOKENS:
        # Seen with vLLM 0.32: 16 and 48 end the start, 32, 64, 128 and 256 work.
        where = where_set(topology, stage, "block-size")
        yield error(where, f"vLLM's attention on CPU takes KV blocks of a multiple of 32 tokens, not {block}")
    chunked = flags.get("enable-chunked-prefill")
    if chunked is False and tokens is not None and length is not None and tokens < length:
        where = where_set(topology, stage, "max-num-batched-tokens")
        yield error(where, f"without chunked prefill it must be at least max_model_len {length}, not {tokens}")


def _shape(stage: Stage, settings: StageSettings) -> Findings:
    shape = settings.parallel
    where = f"{stage}.parallel"
    if shape.context > 1:
        yield error(f"{where}.context", "context parallelism is not supported on vLLM by this release; use tensor")
    if shape.expert not in (1, shape.tensor * shape.data):
        yield error(
            f"{where}.expert",
            f"vLLM spreads experts over all tensor x data ranks: write {shape.tensor * shape.data}, or 1 for none",
        )
    if shape.data > 1:
        yield warning(f"{where}.data", "data parallelism inside an instance is rendered but not tested; replicas are")


def _engine_args(topology: Topology, stage: Stage, settings: StageSettings, table: FlagTable) -> Findings:
    for name, value in settings.engine_args.items():
        where = flag_path(topology, stage, name)
        message = flag_problem(table, name, value, allow_unknown=topology.allow_unknown_engine_args)
        if message is not None:
            yield error(where, message)
            continue
        field = TYPED_FLAGS.get(name)
        if field is None:
            continue
        typed = getattr(settings, field)
        if typed is not None and shown(_vllm_value(field, typed)) != shown(value):
            other = stage_path(topology, stage, field)
            yield error(where, f"{shown(value)} contradicts {other}, which is {typed}; keep one of them")


def _env(topology: Topology, stage: Stage, settings: StageSettings) -> Findings:
    pool = topology.pool(stage)
    for name in settings.env:
        where = f"{stage}.env.{name}" if pool is not None and name in pool.env else f"env.{name}"
        if is_secret(name):
            yield error(where, "a secret in a topology would be printed and stored; export it, engines inherit it")
        elif name in environment.RESERVED:
            yield error(where, f"is set per instance; {environment.RESERVED[name]}")
        elif name == environment.KV_CACHE_GIB and "kv-cache-memory-bytes" in settings.engine_args:
            yield error(where, "silently wins over kv-cache-memory-bytes; keep one of them")
        elif name == "VLLM_PLUGINS" and topology.platform is Platform.CPU and "disagg_cpu" not in settings.env[name]:
            yield error(where, "add disagg_cpu: without it engines on one machine take each other's cores")


def _devices(topology: Topology, instance: Instance) -> Findings:
    if not instance.devices:
        return
    settings = stage_settings(topology, instance.stage)
    ranks = environment.local_ranks(settings)
    count = len(instance.devices)
    where = f"{instance.stage}.device_groups"
    group = format_id_group(instance.devices)
    if topology.platform is Platform.CPU:
        if count < ranks:
            yield error(where, f"{group} has {count} cores for {ranks} ranks of {instance.name}; each needs one")
    elif count != ranks:
        yield error(
            where,
            f"{group} has {count} devices but {instance.name} uses {ranks} (tensor x pipeline x data); "
            f"set {instance.stage}.parallel, such as tensor: {count}",
        )


def _speculation(topology: Topology) -> Findings:
    for stage in topology.stages():
        given = stage_settings(topology, stage).speculative_config
        if given is None:
            continue
        where = f"{stage}.speculative_config"
        for message in faults(given):
            yield error(where, message)
        for old, new in translate(given).renamed:
            yield warning(where, f"{old} is the old spelling; vLLM gets it as {new}")


def _vllm_value(field: str, value: JsonValue) -> JsonValue:
    return KV_CACHE_DTYPES.get(value, value) if field == "kv_cache_dtype" and isinstance(value, str) else value
