"""How many requests a deployment holds, and which pool is the ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from disagg.cost.memory import MemoryPlan, plan_memory
from disagg.errors import ConfigError, Problem
from disagg.project.setup import PoolSetup, Setup
from disagg.topology.spec import Stage


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests that fit.

    Attributes:
        by_pool: The most that each pool holds.
        ceiling: The pool that holds the fewest of those that hold a request from first token to last.
        sustainable: What that pool holds.
        used: Requests of the projection.
        asked: Requests that were asked for; None for the most that fit.
    """

    by_pool: Mapping[Stage, float]
    ceiling: Stage
    sustainable: float
    used: float
    asked: int | None

    @property
    def capped(self) -> bool:
        """Whether more were asked for than fit."""
        return self.asked is not None and self.asked > self.used


# Without a limit of the scheduler a pool of short requests would be priced at batches that nobody runs. This is what
# vLLM's server takes for --max-num-seqs on devices with 70 GiB and more.
DEFAULT_MOST_SEQUENCES = 1024


def capacity(setup: Setup) -> Capacity:
    """Count what fits.

    Raises:
        ConfigError: If a pool does not hold a single request, with what is missing.
    """
    problems: list[Problem] = []
    by_pool: dict[Stage, float] = {}
    for stage, pool in setup.pools.items():
        if stage is Stage.ENCODE:
            continue
        each = replica_capacity(setup, pool)
        if each < 1:
            problems.append(_too_big(setup, pool))
        by_pool[stage] = each * pool.replicas
    if problems:
        raise ConfigError(problems)
    ceiling = Stage.DECODE if Stage.DECODE in by_pool else Stage.COLOCATED
    sustainable = by_pool[ceiling]
    used = min(float(setup.clients), sustainable) if setup.clients is not None else sustainable
    return Capacity(by_pool, ceiling, sustainable, used, setup.clients)


def replica_capacity(setup: Setup, pool: PoolSetup) -> float:
    """Requests that one replica holds: what memory or the stated pool of tokens allows, and the scheduler."""
    settings = setup.topology.projection
    if settings.kv_pool_tokens is not None:
        resident = settings.workload_resident_tokens or setup.context
        fitting = float(settings.kv_pool_tokens // resident)
    else:
        fitting = float(memory_of(setup, pool, 1).most_sequences)
    return min(fitting, float(pool.most_sequences or DEFAULT_MOST_SEQUENCES))


def memory_of(setup: Setup, pool: PoolSetup, sequences: float) -> MemoryPlan:
    """The fullest device of a replica that holds so many sequences."""
    tokens = float(setup.context)
    if pool.stage is Stage.PREFILL:
        tokens = float(np.max(setup.workload.input_tokens))
    return plan_memory(pool.replica, sequences, tokens, pool.budget)


def _too_big(setup: Setup, pool: PoolSetup) -> Problem:
    plan = memory_of(setup, pool, 1)
    what = f"{setup.model.name} with one sequence of {setup.context} tokens on {pool.replica.accelerator.name}"
    advice = "spread it over more devices, or store weights or KV in a smaller number format"
    return Problem(f"{pool.stage}.parallel.tensor", f"{what} {plan.verdict()}; {advice}")
