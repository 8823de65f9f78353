"""Arithmetic and traffic of feed-forward layers on one device: dense ones and mixtures of experts."""

from __future__ import annotations

import math

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.catalog.model import DenseMlp, MoeMlp
from disagg.catalog.precision import Dtype
from disagg.cost.experts import distinct_experts
from disagg.cost.load import Load
from disagg.cost.operator import ACTIVATION_BYTES, Operator, cast, product, stream
from disagg.cost.plan import Replica
from disagg.cost.work import Array

PADDED_ROWS = 64.0
"""Rows that an expert's product computes beyond its tokens: half of a tile of 128, the larger ones of such kernels.
It reproduces the grouped products of alibaba/InferSim's tables for H20 and H800."""


def dense_operators(mlp: DenseMlp, replica: Replica, load: Load, count: float) -> list[Operator]:
    """Operators of `count` layers: 2 h f FLOPs per token and matrix, two of them fused into one product if gated."""
    width = math.ceil(mlp.width / replica.shape.tensor)
    return _feed_forward("mlp", width, (mlp.gated, load.dense_tokens), replica, count)


def _feed_forward(part: str, width: float, how: tuple[bool, Array], replica: Replica, count: float) -> list[Operator]:
    gated, tokens = how
    hidden, precision = replica.model.hidden, replica.precision
    weights = precision.dense, precision.activations
    into = (2 if gated else 1) * width
    return [
        *product(part, tokens, (hidden, into), count, *weights),
        stream(part, tokens * (into + width) * ACTIVATION_BYTES, count),
        *product(part, tokens, (width, hidden), count, *weights),
    ]


def moe_operators(mlp: MoeMlp, replica: Replica, load: Load, count: float) -> list[Operator]:
    """Operators of `count` layers: the router, the experts that tokens reach, and those that all tokens pass.

    A rank that holds E / ranks experts reads those that at least one of the stage's tokens reaches and computes its
    share of tokens x active products. The busiest rank has `expert_balance` times the mean, less what copies of
    busy experts take off: 1 + (balance - 1) E / (E + copies).
    """
    shape, hidden = replica.shape, replica.model.hidden
    router = product("router", load.tokens, (hidden, mlp.experts), count, Dtype.BF16, Dtype.BF16)
    operators = [*router, stream("router", load.tokens * (mlp.experts * 4.0 + hidden * ACTIVATION_BYTES), count)]
    operators += _routed(mlp, replica, load, count)
    if mlp.shared_width:
        ranks = shape.shared_ranks
        tokens = load.tokens if ranks == shape.attention_tensor else load.dense_tokens
        width = math.ceil(mlp.shared_width / ranks)
        operators += _feed_forward("shared_experts", width, (mlp.gated, tokens), replica, count)
    operators.append(stream("experts", load.tokens * (mlp.active + 1) * hidden * ACTIVATION_BYTES, count))
    return operators


def _routed(mlp: MoeMlp, replica: Replica, load: Load, count: float) -> list[Operator]:
    shape, precision, habits = replica.shape, replica.precision, replica.habits
    ranks, hidden = shape.expert_ranks, replica.model.hidden
    width = math.ceil(mlp.width / shape.expert_tensor)
    balance = 1.0 + (habits.expert_balance - 1.0) * mlp.experts / (mlp.experts + habits.redundant_experts)
    reached = np.minimum(
        distinct_experts(mlp, load.stage_tokens, habits.routing_skew) / ranks * (balance if ranks > 1 else 1.0),
        math.ceil((mlp.experts + habits.redundant_experts) / ranks),
    )
    rows = load.stage_tokens * mlp.active / ranks * (balance if ranks > 1 else 1.0)
    into = (2 if mlp.gated else 1) * width
    activations = precision.activations.bytes_per_element

    def grouped(inputs: float, outputs: float) -> Operator:
        weight_bytes = reached * (inputs * outputs * precision.experts.bytes_per_element)
        moved = weight_bytes + rows * (inputs * activations + outputs * ACTIVATION_BYTES)
        return Operator(
            "experts",
            Kernel.GROUPED_GEMM,
            Kernel.WEIGHTS,
            precision.experts,
            precision.activations,
            count,
            rows * (2.0 * inputs * outputs) * count,
            moved * count,
            wasted=reached * (PADDED_ROWS * 2.0 * inputs * outputs * count),
            depth=inputs,
        )

    acted = stream("experts", rows * (into + width) * ACTIVATION_BYTES, count)
    # Tokens are cast before they are copied to their experts.
    casts = cast(load.tokens, hidden, count, precision.activations) + cast(rows, width, count, precision.activations)
    return [*casts, grouped(hidden, into), acted, grouped(width, hidden)]
