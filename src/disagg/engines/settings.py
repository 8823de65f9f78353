"""What one stage of a topology was given, with the topology's own values where the pool sets none."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from disagg.topology.effective import stage_value
from disagg.topology.spec import ParallelShape, Pool, Stage, Topology


@dataclass(frozen=True, slots=True)
class StageSettings:
    """The values that hold for every instance of one stage. Units are those of the fields of `Pool`."""

    parallel: ParallelShape
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_seq_len_to_capture: int | None
    max_model_len: int | None
    kv_cache_dtype: str | None
    block_size: int | None
    quantization: str | None
    override_qaic_config: dict[str, JsonValue] | None
    speculative_config: dict[str, JsonValue] | None
    engine_args: dict[str, JsonValue]
    env: dict[str, str]


def stage_settings(topology: Topology, stage: Stage) -> StageSettings:
    """Resolve a stage: a field of its pool wins over the topology's field of the same name."""
    pool = topology.pool(stage) or Pool()
    return StageSettings(
        parallel=pool.parallel,
        max_num_seqs=stage_value(topology, stage, "max_num_seqs"),
        max_num_batched_tokens=stage_value(topology, stage, "max_num_batched_tokens"),
        max_seq_len_to_capture=stage_value(topology, stage, "max_seq_len_to_capture"),
        max_model_len=stage_value(topology, stage, "max_model_len"),
        kv_cache_dtype=stage_value(topology, stage, "kv_cache_dtype"),
        block_size=stage_value(topology, stage, "block_size"),
        quantization=stage_value(topology, stage, "quantization"),
        override_qaic_config=stage_value(topology, stage, "override_qaic_config"),
        speculative_config=pool.speculative_config,
        engine_args={**normal_flags(topology.engine_args), **normal_flags(pool.engine_args)},
        env={**topology.env, **pool.env},
    )


def normal_flags(engine_args: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Engine flags by one spelling of their names: no leading dashes, dashes inside."""
    return {flag_name(name): value for name, value in engine_args.items()}


def flag_name(name: str) -> str:
    """``--max_num_seqs`` and ``max-num-seqs`` are one flag, the latter is its name; a dotted part stays as it is."""
    head, dot, part = name.strip().lstrip("-").partition(".")
    return head.replace("_", "-") + dot + part


def flag_path(topology: Topology, stage: Stage, flag: str) -> str:
    """Where an engine flag of a stage was set."""
    pool = topology.pool(stage)
    if pool is not None and flag in normal_flags(pool.engine_args):
        return f"{stage}.engine_args.{flag}"
    return f"engine_args.{flag}"
