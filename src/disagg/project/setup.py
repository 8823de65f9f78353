"""From a topology to what the formulas of a projection take: replicas, links, a workload. Every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.model import Model, MoeMlp
from disagg.catalog.models import find_model
from disagg.cost.checks import shape_problems
from disagg.cost.memory import GIB, Budget
from disagg.cost.plan import Replica, Shape
from disagg.cost.speculation import Speculation
from disagg.cost.work import Pricer
from disagg.errors import ConfigError, Problem
from disagg.project.colocated import Chunking
from disagg.project.devices import with_settings
from disagg.project.first_token import HostTimes
from disagg.project.habits import habits_of, precision_of
from disagg.project.links import link_of
from disagg.project.not_yet import not_yet
from disagg.project.pricing import pricer_of
from disagg.project.transfer import TransferLink
from disagg.project.workload import Workload, cached_tokens
from disagg.topology.effective import stage_value
from disagg.topology.projection_spec import Projection
from disagg.topology.spec import Pool, Stage, Topology

_T = TypeVar("_T")
_PLACES = {
    "tensor": "{stage}.parallel.tensor",
    "pipeline": "{stage}.parallel.pipeline",
    "expert": "{stage}.parallel.expert",
    "attention data": "projection.attention_dp_size",
    "context": "{stage}.parallel.context",
}
"""Where the fields of a shape come from."""


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """A pool of equal replicas, ready to be priced.

    Attributes:
        stage: Which.
        replica: One of them.
        replicas: How many.
        budget: How each uses memory.
        speculation: How its decode steps propose tokens.
        chunking: How it cuts prompts.
        most_sequences: Most sequences that its scheduler lets run at once; None for what memory allows.
        pricer: Prices its steps: the cost model, corrected by measured steps where there are any.
    """

    stage: Stage
    replica: Replica
    replicas: int
    budget: Budget
    speculation: Speculation
    chunking: Chunking
    most_sequences: int | None
    pricer: Pricer

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.replicas * self.replica.shape.devices


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a projection needs.

    Attributes:
        topology: As it was given.
        model: What is served.
        pools: The pools by stage.
        workload: What is asked of them.
        context: Tokens that memory is planned for, per sequence.
        clients: Requests in the system that were asked for; None for the most that fit.
        link: What carries the KV cache; None where there is no split.
        host: What hosts add.
    """

    topology: Topology
    model: Model
    pools: Mapping[Stage, PoolSetup]
    workload: Workload
    context: int
    clients: int | None
    link: TransferLink | None
    host: HostTimes

    @property
    def split(self) -> bool:
        """Whether prefill and decode are apart."""
        return Stage.PREFILL in self.pools and Stage.DECODE in self.pools

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.devices for pool in self.pools.values())


def make_setup(topology: Topology) -> Setup:
    """Read a topology.

    Raises:
        ConfigError: With everything that is wrong: names that are not in the catalogue, shapes that do not divide a
            model, figures that are missing.
    """
    problems = not_yet(topology)
    model = _found(lambda: find_model(topology.model), problems, "model")
    pools: dict[Stage, PoolSetup] = {}
    if model is not None:
        for stage in topology.stages():
            pool = topology.pool(stage)
            if pool is not None:
                made = _pool(topology, stage, pool, model, problems)
                if made is not None:
                    pools[stage] = made
    split = topology.prefill is not None and topology.decode is not None
    link = _found(lambda: link_of(topology), problems) if split else None
    if problems or model is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    asked = topology.workload
    context = asked.max_context_len or asked.input_len + asked.output_len
    return Setup(
        topology=topology,
        model=model,
        pools=pools,
        workload=_workload(topology, pools),
        context=context,
        clients=asked.max_concurrency,
        link=link,
        host=HostTimes(
            request=asked.request_overhead_ms / 1e3,
            tokenize=asked.tokenize_overhead_us / 1e6,
            detokenize=asked.detokenize_overhead_us / 1e6,
            admission_steps=topology.projection.decode_admission_steps,
            stream_interval=asked.stream_interval,
        ),
    )


def _pool(topology: Topology, stage: Stage, pool: Pool, model: Model, problems: list[Problem]) -> PoolSetup | None:
    settings = topology.projection
    device = _device(settings, stage, problems)
    shape = _shape(topology, stage, pool, model)
    places = {field: place.format(stage=stage) for field, place in _PLACES.items()}
    problems.extend(
        Problem(places.get(found.where, found.where), found.message) for found in shape_problems(model, shape)
    )
    if device is None:
        return None
    precision = _found(lambda: precision_of(topology, stage, model, device), problems)
    if precision is None or shape_problems(model, shape):
        return None
    replica = Replica(model, device, shape, precision, habits_of(settings))
    steps = settings.speculative_num_tokens + 1 if stage in (Stage.DECODE, Stage.COLOCATED) else 1
    pricer = _found(lambda: pricer_of(settings, stage, replica, steps), problems)
    if pricer is None:
        return None
    budget_tokens = stage_value(topology, stage, "max_num_batched_tokens")
    chunk = stage_value(topology, stage, "max_seq_len_to_capture")
    proposals = settings.speculative_num_tokens if stage in (Stage.DECODE, Stage.COLOCATED) else 0
    return PoolSetup(
        stage=stage,
        replica=replica,
        replicas=_replicas(pool),
        budget=Budget(
            share=settings.kv_cache_memory_fraction,
            block=stage_value(topology, stage, "block_size") or 0,
            step_tokens=float(budget_tokens or 8192),
            offload=settings.kv_offload_gb_per_gpu * GIB,
        ),
        speculation=Speculation(
            proposals, settings.speculative_acceptance_rate, settings.speculative_draft_cost_factor
        ),
        chunking=Chunking(chunk=chunk or 0, budget=budget_tokens or 0),
        most_sequences=stage_value(topology, stage, "max_num_seqs"),
        pricer=pricer,
    )


def _device(settings: Projection, stage: Stage, problems: list[Problem]) -> Accelerator | None:
    """The device of a stage, with the figures that the user gave."""
    own = {Stage.PREFILL: "prefill_accelerator", Stage.DECODE: "decode_accelerator"}.get(stage)
    place = own if own is not None and getattr(settings, own) is not None else "accelerator"
    name: str | None = getattr(settings, place)
    if name is None:
        problems.append(
            Problem(
                "projection.accelerator",
                "which device the pools run on is not given; `disagg accelerators` lists them",
            )
        )
        return None
    device = _found(lambda: find_accelerator(name), problems, f"projection.{place}")
    return None if device is None else _found(lambda: with_settings(device, settings), problems)


def _replicas(pool: Pool) -> int:
    for given in (pool.replicas, len(pool.device_groups or ()), len(pool.ports or ())):
        if given:
            return given
    return 1


def _shape(topology: Topology, stage: Stage, pool: Pool, model: Model) -> Shape:
    """The cost model's shape. Data parallelism of an instance is attention's: its ranks share the experts."""
    parallel, settings = pool.parallel, topology.projection
    own = {Stage.PREFILL: settings.prefill_attention_dp, Stage.DECODE: settings.decode_attention_dp}.get(stage)
    return Shape(
        tensor=parallel.tensor * parallel.data,
        pipeline=parallel.pipeline,
        # Experts that are not there can be spread anywhere: a command line for one kind of model works for another.
        expert=parallel.expert if has_experts(model) else 1,
        attention_data=(own or settings.attention_dp_size) * parallel.data,
        context=parallel.context,
    )


def has_experts(model: Model) -> bool:
    """Whether any layer is a mixture of experts."""
    return any(isinstance(block.mlp, MoeMlp) for block in model.blocks)


def _workload(topology: Topology, pools: Mapping[Stage, PoolSetup]) -> Workload:
    asked = topology.workload
    decoding = pools.get(Stage.DECODE) or pools.get(Stage.COLOCATED)
    speculation = decoding.speculation if decoding is not None else Speculation()
    length = np.asarray(float(asked.input_len))
    return Workload(
        input_tokens=length,
        output_tokens=np.asarray(float(asked.output_len)),
        cached_tokens=cached_tokens(length, asked.prefix_cache_hit_rate),
        tokens_per_step=speculation.gain,
        step_tokens=speculation.step_tokens,
    )


def _found(find: Callable[[], _T], problems: list[Problem], where: str | None = None) -> _T | None:
    """What `find` returns, or None with its problems noted, at a place of the topology if one is named."""
    try:
        return find()
    except ConfigError as error:
        problems.extend(
            p if where is None else Problem(where, f"{p.where.rpartition(' ')[2]} {p.message}")
            for p in error.problems
        )
        return None
