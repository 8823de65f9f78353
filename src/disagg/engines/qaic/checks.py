"""What Cloud AI refuses, or is known not to support, found before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engines.findings import Findings, error, shown, split, warning
from disagg.engines.flags import flag_problem
from disagg.engines.qaic import cores, speculation
from disagg.engines.qaic.command import flag_table
from disagg.engines.qaic.stage import MXINT8_NAMES, StagePlan, hands_over, plan, role
from disagg.engines.settings import flag_path
from disagg.errors import Problem
from disagg.topology.effective import stage_path
from disagg.topology.instances import Instance
from disagg.topology.secrets import is_secret
from disagg.topology.spec import Stage, Topology
from disagg.units import format_id_group

_KV_DTYPES = ("auto", "fp16", "float16", *sorted(MXINT8_NAMES))
_MAX_SLICES = 16
DRY_RUN_ONLY = "platform qaic is tested by dry run only: no Cloud AI card was at hand"


def check(topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of a topology on Cloud AI, each once."""
    return split(_findings(topology, instances))


def _findings(topology: Topology, instances: Sequence[Instance]) -> Findings:
    yield warning("platform", DRY_RUN_ONLY)
    yield from _features(topology)
    plans = [(instance, plan(topology, instance)) for instance in instances]
    for instance, stage in plans:
        yield from _settings(topology, instance, stage)
        yield from _override(topology, instance, stage)
        yield from _engine_args(topology, instance.stage, stage)
        yield from speculation.findings(topology, instance.stage, stage)
    yield from cores.findings(plans)
    yield from _pair(topology, plans)


def _features(topology: Topology) -> Findings:
    link = topology.link
    for field in ("prefill_policy", "decode_policy"):
        if getattr(topology.router, field) == "kv-affinity":
            yield error(f"router.{field}", "Cloud AI publishes no KV events; prefix-affinity needs none")
    if topology.kv_store is not None:
        yield error("kv_store", "a shared KV store is not served by this release; leave it out")
    if topology.encode is not None:
        yield warning(
            "encode", "the encode instances are rendered, but this release's router does not send pictures to them"
        )
    if link.transport == "nixl":
        yield error("link.transport", "Cloud AI hands KV over through shared memory; choose shared-memory or auto")
    if link.dialect != "auto":
        yield error("link.dialect", "Cloud AI has a handoff of its own; leave it at auto")
    if link.handoff_store_mb is not None and link.handoff_store_entries is not None:
        yield error("link.handoff_store_entries", "the hand-off store has one size; give it in MB or in entries")
    for field in ("lease_s", "on_failure", "side_channel_port"):
        if field in link.model_fields_set:
            yield warning(f"link.{field}", "has no effect on qaic: a missing KV fails the request after five tries")


def _settings(topology: Topology, instance: Instance, stage: StagePlan) -> Findings:
    settings, name = stage.settings, instance.stage
    dtype = settings.kv_cache_dtype
    if dtype is not None and dtype not in _KV_DTYPES:
        where = stage_path(topology, name, "kv_cache_dtype")
        yield error(where, f"{dtype} is no KV format of Cloud AI; choose one of {', '.join(_KV_DTYPES)}")
    shape = settings.parallel
    for field, instead in (
        ("pipeline", "use stages in override_qaic_config"),
        ("data", "use replicas"),
        ("expert", "leave it out"),
        ("context", "leave it out"),
    ):
        if getattr(shape, field) > 1:
            yield error(f"{name}.parallel.{field}", f"is not a setting of Cloud AI; {instead}")
    stages = stage.override.integer("stages") or 1
    count = len(instance.devices)
    if count and shape.tensor > 1 and shape.tensor * stages != count:
        yield error(
            f"{name}.parallel.tensor",
            f"{shape.tensor} x {stages} stages is not the {count} devices of {format_id_group(instance.devices)}",
        )
    if count > _MAX_SLICES * stages:
        yield error(
            f"{name}.device_groups",
            f"{format_id_group(instance.devices)} slices each layer over {count // stages} devices; 16 are the most",
        )
    for variable in settings.env:
        where = f"{name}.env.{variable}" if variable in _pool_env(topology, name) else f"env.{variable}"
        if is_secret(variable):
            yield error(where, "a secret in a topology would be printed and stored; export it, engines inherit it")
        elif variable == "QAIC_VISIBLE_DEVICES":
            yield error(where, "is set per instance; use the stage's device_groups")


def _override(topology: Topology, instance: Instance, stage: StagePlan) -> Findings:
    where = stage_path(topology, instance.stage, "override_qaic_config")
    override, side = stage.override, role(topology, instance.stage)
    for message in override.errors:
        yield error(where, message)
    for note in override.notes:
        yield warning(where, note)
    group = override.device_group
    if instance.devices and group is not None and group != instance.devices:
        yield error(
            where,
            f"device_group {shown(list(group))} is not the device group of {instance.name}, "
            f"{format_id_group(instance.devices)}; set {instance.stage}.device_groups only",
        )
    if side is None:
        if instance.stage is not Stage.ENCODE and "prefill_only" in override.config:
            yield error(where, "prefill_only compiles half an engine, but this stage does both halves; leave it out")
        return
    if override.config["prefill_only"] is not (side == "kv_producer"):
        yield error(where, f"prefill_only is {shown(override.config['prefill_only'])} on a {side}; leave it out")
    if side == "kv_producer":
        yield from _prefill_override(topology, instance.stage, stage, where)
    elif override.is_on("ccl_enabled") and "comp_ctx_lengths_decode" not in override.config:
        yield error(where, "ccl_enabled needs explicit comp_ctx_lengths_decode when stages are separate")


def _prefill_override(topology: Topology, name: Stage, stage: StagePlan, where: str) -> Findings:
    override = stage.override
    stages, batch = override.integer("stages") or 1, stage.settings.max_num_seqs
    if batch is not None and batch > stages:
        yield error(
            stage_path(topology, name, "max_num_seqs"),
            f"a prefill batch is at most its pipeline stages: {batch} sequences need stages:{batch} in {where}",
        )
    if override.is_on("aic_include_sampler"):
        yield error(where, "on-device sampling (aic_include_sampler) is for decode only")
    if override.is_on("ccl_enabled") or any(key.startswith("comp_ctx_lengths") for key in override.config):
        yield warning(where, "compiled context lengths are documented for decode only; newer compilers may take them")


def _engine_args(topology: Topology, name: Stage, stage: StagePlan) -> Findings:
    flags = stage.settings.engine_args
    for flag, value in flags.items():
        message = flag_problem(flag_table(), flag, value, allow_unknown=topology.allow_unknown_engine_args)
        if message is not None:
            yield error(flag_path(topology, name, flag), message)
    if role(topology, name) is None:
        return
    refused = {
        "enforce-eager": "disaggregation needs binaries compiled ahead of time; eager mode has none",
        "enable-lora": "LoRA does not work with disaggregation on Cloud AI",
        "lora-modules": "LoRA does not work with disaggregation on Cloud AI",
        "enable-prefix-caching": "prefix caching is off in disaggregated roles on Cloud AI",
    }
    for flag, reason in refused.items():
        if flags.get(flag) not in (None, False):
            yield error(flag_path(topology, name, flag), reason)


def _pair(topology: Topology, plans: Sequence[tuple[Instance, StagePlan]]) -> Findings:
    if not hands_over(topology):
        return
    prefill = next((stage for instance, stage in plans if instance.stage is Stage.PREFILL), None)
    decode = next((stage for instance, stage in plans if instance.stage is Stage.DECODE), None)
    if prefill is None or decode is None:
        return
    ours, theirs = _kv_format(prefill), _kv_format(decode)
    if ours != theirs:
        yield error(
            stage_path(topology, Stage.DECODE, "kv_cache_dtype"),
            f"prefill stores {ours} and decode loads {theirs}; both need the same: set it for all stages",
        )
    if prefill.settings.block_size != decode.settings.block_size:
        yield error(
            stage_path(topology, Stage.DECODE, "block_size"),
            f"prefill has {shown(prefill.settings.block_size)} and decode {shown(decode.settings.block_size)}; "
            "both need the same: set it for all stages",
        )
    if prefill.settings.max_model_len != decode.settings.max_model_len:
        yield warning(
            stage_path(topology, Stage.DECODE, "max_model_len"),
            f"prefill has {shown(prefill.settings.max_model_len)} and decode {shown(decode.settings.max_model_len)}; "
            "prompts that fit only one are refused",
        )


def _kv_format(stage: StagePlan) -> str:
    if stage.settings.kv_cache_dtype in MXINT8_NAMES or stage.override.is_on("mxint8_kv_cache"):
        return "mxint8"
    return "fp16"


def _pool_env(topology: Topology, name: Stage) -> dict[str, str]:
    pool = topology.pool(name)
    return pool.env if pool is not None else {}
