"""What a device's memory has to hold, whether it does, and how many sequences it holds at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.catalog.figure import Figure, Origin
from disagg.catalog.model import DenseMlp, LatentAttention, LinearAttention, Mlp, MoeMlp, SoftmaxAttention
from disagg.cost.attention import local_heads
from disagg.cost.kv import device_sequence_bytes
from disagg.cost.operator import ACTIVATION_BYTES
from disagg.cost.plan import Replica
from disagg.cost.weights import weight_bytes
from disagg.cost.work import Array
from disagg.errors import ConfigError, Problem

GIB = float(2**30)

DEFAULT_SHARE = Figure(0.9, Origin.DEFAULT, "vLLM's default of --gpu-memory-utilization up to 0.15")
"""Share of a device's memory that an engine may use."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How an engine uses a device's memory.

    Attributes:
        share: Share of the memory that it may use.
        reserve: Bytes that go to contexts, libraries and captured graphs.
        block: Tokens of a block of the cache; 0 for none.
        step_tokens: Most tokens that a step computes; activations are for so many.
        step_outputs: Most tokens of a step that need logits.
        draft: Bytes of a draft model or of draft layers.
        offload: Bytes of host memory per device that hold caches that are not in use.
    """

    share: float = DEFAULT_SHARE.value
    reserve: float = 0.0
    block: int = 0
    step_tokens: float = 8192.0
    step_outputs: float = 256.0
    draft: float = 0.0
    offload: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The fullest device of a replica. Bytes; arrays by point.

    Attributes:
        weights: By part.
        draft: Of a draft model.
        activations: Working set of the largest step.
        reserve: Set aside.
        kv: Cache of the sequences that were asked for.
        capacity: Of the device.
        usable: What the engine may use of it.
        per_sequence: Cache of one sequence on a device that holds it.
        most_sequences: Sequences that fit at the same time, in the whole replica; 0 if not even the weights do.
        parked: Sequences whose caches fit into host memory beside those, in the whole replica.
    """

    weights: Mapping[str, float]
    draft: float
    activations: float
    reserve: float
    kv: Array
    capacity: float
    usable: float
    per_sequence: Array
    most_sequences: Array
    parked: Array

    @property
    def fixed(self) -> float:
        """Bytes that are needed without any sequence."""
        return sum(self.weights.values()) + self.draft + self.activations + self.reserve

    @property
    def total(self) -> Array:
        """Bytes in all."""
        return self.fixed + self.kv

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether the sequences that were asked for fit."""
        answer: NDArray[np.bool_] = np.asarray(self.total <= self.usable)
        return answer

    @property
    def missing(self) -> Array:
        """Bytes by which it is too much; 0 where it fits."""
        over: Array = np.maximum(self.total - self.usable, 0.0)
        return over

    def verdict(self) -> str:
        """One line on the largest point: what is needed and what there is."""
        weights, cache = sum(self.weights.values()) / GIB, float(np.max(self.kv)) / GIB
        other = self.fixed / GIB - weights
        fitting = "fits" if bool(np.all(self.fits)) else "does not fit"
        return (
            f"{fitting}: needs {weights + cache + other:.1f} GiB per device "
            f"({weights:.1f} weights, {cache:.1f} KV cache, {other:.1f} other), "
            f"device has {self.usable / GIB:.1f} of {self.capacity / GIB:.1f} GiB usable"
        )


def plan_memory(replica: Replica, sequences: Array | float, tokens: Array | float, budget: Budget) -> MemoryPlan:
    """Plan the fullest device.

    Args:
        replica: Model, device, shape, formats.
        sequences: Sequences in the whole replica.
        tokens: Tokens that each has in the cache at most.
        budget: How the engine uses memory.

    Returns:
        The plan; arrays have the shape that `sequences` and `tokens` broadcast to.
    """
    shape = replica.shape
    sequences, tokens = np.broadcast_arrays(
        np.asarray(sequences, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    )
    weights = weight_bytes(replica)
    activations = activation_bytes(replica, budget.step_tokens, budget.step_outputs)
    each = device_sequence_bytes(replica, tokens, budget.block)
    usable = replica.accelerator.memory.value * budget.share
    room = usable - sum(weights.values()) - activations - budget.reserve - budget.draft
    most = np.divide(np.maximum(room, 0.0), each, out=np.full(each.shape, np.inf), where=each > 0)
    parked = np.divide(budget.offload, each, out=np.full(each.shape, np.inf), where=each > 0)
    return MemoryPlan(
        weights=weights,
        draft=budget.draft,
        activations=activations,
        reserve=budget.reserve,
        kv=np.ceil(sequences / shape.attention_groups) * each,
        capacity=replica.accelerator.memory.value,
        usable=usable,
        per_sequence=each,
        most_sequences=np.floor(most) * shape.attention_groups,
        parked=np.floor(parked) * shape.attention_groups,
    )


def restore_seconds(plan: MemoryPlan, replica: Replica, bandwidth: float | None = None) -> Array:
    """Seconds in which one parked cache comes back to its devices, each over its own link at the same time.

    Args:
        plan: The plan that it was parked under.
        replica: The replica.
        bandwidth: Bytes/s of a device's link to host memory; the accelerator's figure if not given.

    Raises:
        ConfigError: If neither is known.
    """
    if bandwidth is None:
        figure = replica.accelerator.host_link
        if figure is None:
            where = f"accelerator {replica.accelerator.name}"
            raise ConfigError([Problem(where, "has no figure for its link to host memory; give its bandwidth")])
        bandwidth = figure.value
    return plan.per_sequence / bandwidth


def pool_tokens(replica: Replica, budget: Budget) -> float:
    """Tokens that the caches of a replica hold in all, if every layer keeps every token.

    What engines print as the size of their cache. It does not depend on the sequences' lengths, so that windowed
    layers count whole; `plan_memory` counts them as they are.
    """
    plan = plan_memory(replica, 0.0, float(max(budget.block, 1)), budget)
    room = plan.usable - plan.fixed
    each = float(plan.per_sequence) / max(budget.block, 1)
    return max(room, 0.0) // each * replica.shape.attention_groups if each else float("inf")


def activation_bytes(replica: Replica, tokens: float, outputs: float) -> float:
    """Working set of one step on one device: that of the widest layer, as layers reuse each other's memory.

    Stream and residual, and what the layer's attention or feed-forward part makes of them; then the logits of
    `outputs` tokens in 32 bits. Every rank of a tensor-parallel group sees all tokens of its attention group.
    """
    model, shape = replica.model, replica.shape
    widest = 0.0
    for block in model.blocks:
        widest = max(widest, _attention_width(block.attention, replica), _mlp_width(block.mlp, replica))
    logits = outputs * model.vocabulary / shape.tensor * 4.0
    return max(tokens * (2.0 * model.hidden + widest) * ACTIVATION_BYTES, logits + outputs * model.hidden * 4.0)


def _attention_width(attention: object, replica: Replica) -> float:
    ranks = replica.shape.attention_tensor
    match attention:
        case SoftmaxAttention():
            heads, kv_heads = local_heads(attention, ranks)
            return float((heads + kv_heads) * (attention.head_dim + attention.value_dim))
        case LatentAttention():
            down = attention.kv_rank + attention.rope_dim + (attention.q_rank or 0)
            per_head = 2 * attention.nope_dim + 2 * attention.rope_dim + 2 * attention.value_dim
            return float(down + attention.heads / ranks * per_head)
        case LinearAttention():
            wide = 2 * attention.key_heads * attention.key_dim + 3 * attention.value_heads * attention.value_dim
            return wide / ranks
        case _:
            return 0.0


def _mlp_width(mlp: Mlp | None, replica: Replica) -> float:
    shape = replica.shape
    match mlp:
        case DenseMlp():
            return (3 if mlp.gated else 2) * mlp.width / shape.tensor
        case MoeMlp():
            # A rank sees the tokens of all groups for its share of the experts: groups / ranks of them on average.
            copies = mlp.active * shape.attention_groups / shape.expert_ranks
            inner = (3 if mlp.gated else 2) * mlp.width / shape.expert_tensor
            return copies * (inner + 2 * replica.model.hidden)
        case _:
            return 0.0
