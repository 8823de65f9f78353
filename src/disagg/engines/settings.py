"""What one stage of a topology was given, with the topology's own values where the pool sets none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import JsonValue

from disagg.topology.spec import ParallelShape, Pool, Stage, Topology

T = TypeVar("T")


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
        max_num_seqs=_first(pool.max_num_seqs, topology.max_num_seqs),
        max_num_batched_tokens=_first(pool.max_num_batched_tokens, topology.max_num_batched_tokens),
        max_seq_len_to_capture=_first(pool.max_seq_len_to_capture, topology.max_seq_len_to_capture),
        max_model_len=_first(pool.max_model_len, topology.max_model_len),
        kv_cache_dtype=_first(pool.kv_cache_dtype, topology.kv_cache_dtype),
        block_size=_first(pool.block_size, topology.block_size),
        quantization=_first(pool.quantization, topology.quantization),
        override_qaic_config=_first(pool.override_qaic_config, topology.override_qaic_config),
        speculative_config=pool.speculative_config,
        engine_args=normal_flags({**normal_flags(topology.engine_args), **normal_flags(pool.engine_args)}),
        env={**topology.env, **pool.env},
    )


def normal_flags(engine_args: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Engine flags by one spelling of their names: no leading dashes, dashes inside."""
    flags: dict[str, JsonValue] = {}
    for name, value in engine_args.items():
        flags[flag_name(name)] = value
    return flags


def flag_name(name: str) -> str:
    """``--max_num_seqs`` and ``max-num-seqs`` are one flag; the latter is its name."""
    return name.strip().lstrip("-").replace("_", "-")


def field_path(topology: Topology, stage: Stage, field: str) -> str:
    """Where a value of a stage was set: the pool's path if the pool sets it, else the topology's."""
    pool = topology.pool(stage)
    if pool is not None and field in pool.model_fields_set:
        return f"{stage}.{field}"
    return field


def flag_path(topology: Topology, stage: Stage, flag: str) -> str:
    """Where an engine flag of a stage was set."""
    pool = topology.pool(stage)
    if pool is not None and flag in normal_flags(pool.engine_args):
        return f"{stage}.engine_args.{flag}"
    return f"engine_args.{flag}"


def _first(own: T | None, shared: T | None) -> T | None:
    return own if own is not None else shared
