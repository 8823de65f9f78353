"""Bytes of a model's weights that one device holds, by part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from disagg.catalog.model import Attention, DenseMlp, LatentAttention, LinearAttention, Mlp, MoeMlp, SoftmaxAttention
from disagg.catalog.params import attention_parameters, mlp_parameters, vision_parameters
from disagg.catalog.precision import Dtype
from disagg.cost.attention import local_heads
from disagg.cost.kv import stage_share
from disagg.cost.plan import Precision, Replica, Shape


def local_attention(attention: Attention, shape: Shape) -> Attention:
    """What of a layer's attention one rank has: its heads. Latents are whole on every rank."""
    ranks = shape.attention_tensor
    match attention:
        case SoftmaxAttention():
            heads, kv_heads = local_heads(attention, ranks)
            return replace(attention, heads=heads, kv_heads=kv_heads)
        case LatentAttention():
            return replace(attention, heads=math.ceil(attention.heads / ranks))
        case LinearAttention():
            key_heads, value_heads = math.ceil(attention.key_heads / ranks), math.ceil(attention.value_heads / ranks)
            return replace(attention, key_heads=key_heads, value_heads=value_heads)


def local_mlp(mlp: Mlp, shape: Shape, copies: int = 0) -> Mlp:
    """What of a layer's feed-forward part one rank has: its columns, or its experts and their copies."""
    match mlp:
        case DenseMlp():
            return replace(mlp, width=math.ceil(mlp.width / shape.tensor))
        case MoeMlp():
            return replace(
                mlp,
                experts=math.ceil((mlp.experts + copies) / shape.expert_ranks),
                width=math.ceil(mlp.width / shape.expert_tensor),
                shared_width=math.ceil(mlp.shared_width / shape.shared_ranks),
            )


def weight_bytes(replica: Replica) -> Mapping[str, float]:
    """Bytes of weights on the fullest device, by part.

    Of several stages the first has the embedding and the last the head, tied or not. A vision encoder is whole on
    every device, in 16 bits: engines run it data-parallel and do not quantise it.
    """
    model, shape = replica.model, replica.shape
    parts: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        if value:
            size = part_dtype(name, replica.precision).bytes_per_element
            parts[name] = parts.get(name, 0.0) + value * size

    share = stage_share(model, shape.pipeline)
    for block in model.blocks:
        count = block.count * share
        if block.attention is not None:
            add("attention", count * attention_parameters(local_attention(block.attention, shape), model.hidden))
        if block.mlp is not None:
            local = local_mlp(block.mlp, shape, replica.habits.redundant_experts)
            for name, value in mlp_parameters(local, model.hidden).items():
                if name != "router":
                    add(name, count * value)
        if isinstance(block.mlp, MoeMlp):
            add("router", count * model.hidden * block.mlp.experts)
        add("norms", count * model.hidden * ((block.attention is not None) + (block.mlp is not None)))
    rows = math.ceil(model.vocabulary / shape.tensor) * model.hidden
    add("norms", model.hidden)
    add("embedding", rows)
    if shape.pipeline == 1 and not model.tied:
        add("head", rows)
    if model.vision is not None:
        add("vision", vision_parameters(model.vision))
    return parts


def part_dtype(part: str, precision: Precision) -> Dtype:
    """Number format of a part's weights."""
    match part:
        case "experts":
            return precision.experts
        case "embedding" | "head":
            return precision.head
        case "norms" | "router" | "vision":
            return Dtype.BF16
        case _:
            return precision.dense
