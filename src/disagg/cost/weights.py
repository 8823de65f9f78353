"""Parameters of a model by part, and the bytes of them that one device holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from disagg.catalog.model import (
    Attention,
    DenseMlp,
    LatentAttention,
    LinearAttention,
    Mlp,
    Model,
    MoeMlp,
    SoftmaxAttention,
    VisionEncoder,
)
from disagg.catalog.precision import Dtype
from disagg.cost.attention import local_heads
from disagg.cost.kv import stage_share
from disagg.cost.plan import Habits, Precision, Replica, Shape

ALONE = Shape()
NO_COPIES = Habits()


def attention_parameters(attention: Attention | None, hidden: int, shape: Shape = ALONE) -> float:
    """Parameters of one layer's attention on one rank."""
    ranks = shape.attention_tensor
    match attention:
        case SoftmaxAttention():
            heads, kv_heads = local_heads(attention, ranks)
            queries = heads * attention.head_dim
            values = heads * attention.value_dim
            cached = kv_heads * (attention.head_dim + attention.value_dim)
            gate = hidden * values if attention.output_gate else 0
            bias = queries + cached if attention.bias else 0
            return float(hidden * (queries + cached) + values * hidden + gate + bias)
        case LatentAttention():
            return _latent_parameters(attention, hidden, ranks)
        case LinearAttention():
            keys = math.ceil(attention.key_heads / ranks) * attention.key_dim
            values = math.ceil(attention.value_heads / ranks) * attention.value_dim
            wide = 2 * keys + values * (2 if attention.gate else 1) + 2 * math.ceil(attention.value_heads / ranks)
            return float(hidden * wide + values * hidden + attention.conv_width * (2 * keys + values))
        case None:
            return 0.0


def _latent_parameters(attention: LatentAttention, hidden: int, ranks: int) -> float:
    heads = math.ceil(attention.heads / ranks)
    down = attention.kv_rank + attention.rope_dim + (attention.q_rank or 0)
    query = (attention.q_rank or hidden) * heads * (attention.nope_dim + attention.rope_dim)
    lifted = attention.kv_rank * heads * (attention.nope_dim + attention.value_dim)
    total = hidden * down + query + lifted + heads * attention.value_dim * hidden
    if attention.indexer is not None:
        chooser = attention.indexer
        total += (attention.q_rank or hidden) * chooser.heads * chooser.head_dim
        total += hidden * (chooser.head_dim + chooser.heads)
    return float(total)


def mlp_parameters(mlp: Mlp | None, hidden: int, shape: Shape = ALONE, copies: int = 0) -> Mapping[str, float]:
    """Parameters of one layer's feed-forward part on one rank, by part: mlp; experts, shared_experts, router.

    Args:
        mlp: The layer.
        hidden: Width of the stream.
        shape: How the replica is spread.
        copies: Copies of busy experts, over all ranks.
    """
    match mlp:
        case DenseMlp():
            return {"mlp": float(_matrices(mlp.gated) * hidden * math.ceil(mlp.width / shape.tensor))}
        case MoeMlp():
            local = math.ceil((mlp.experts + copies) / shape.expert_ranks)
            width = math.ceil(mlp.width / shape.expert_tensor)
            spread = shape.attention_groups > 1 and shape.expert_ranks > 1
            shared = math.ceil(mlp.shared_width / (shape.attention_tensor if spread else shape.tensor))
            each = _matrices(mlp.gated) * hidden
            return {
                "experts": float(each * width * local),
                "shared_experts": float(each * shared),
                "router": float(hidden * mlp.experts),
            }
        case None:
            return {}


def _matrices(gated: bool) -> int:
    return 3 if gated else 2


def vision_parameters(vision: VisionEncoder) -> float:
    """Parameters of a vision encoder: 4 h^2 for attention and its feed-forward part per layer, patches, projector."""
    layer = 4 * vision.hidden**2 + _matrices(vision.mlp_gated) * vision.hidden * vision.mlp_width
    return float(vision.layers * layer + 3 * vision.patch**2 * vision.hidden + vision.projector_params)


def parameters(model: Model) -> Mapping[str, float]:
    """Parameters of the whole model by part, each once."""
    return _by_part(model, ALONE, NO_COPIES)


def active_parameters(model: Model) -> float:
    """Parameters that one token passes: all but the experts that are not its own, and but the embedding.

    A tied embedding counts, as it is the head. Vision is left out.
    """
    total = dict(parameters(model))
    total["experts"] = sum(
        block.count * _matrices(block.mlp.gated) * model.hidden * block.mlp.width * block.mlp.active
        for block in model.blocks
        if isinstance(block.mlp, MoeMlp)
    )
    total["vision"] = 0.0
    if not model.tied:
        total["embedding"] = 0.0
    return sum(total.values())


def _by_part(model: Model, shape: Shape, habits: Habits) -> dict[str, float]:
    parts: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        if value:
            parts[name] = parts.get(name, 0.0) + value

    share = stage_share(model, shape.pipeline)
    for block in model.blocks:
        count = block.count * share
        add("attention", count * attention_parameters(block.attention, model.hidden, shape))
        for name, value in mlp_parameters(block.mlp, model.hidden, shape, habits.redundant_experts).items():
            add(name, count * value)
        norms = (block.attention is not None) + (block.mlp is not None)
        add("norms", count * norms * model.hidden)
    rows = math.ceil(model.vocabulary / shape.tensor) * model.hidden
    add("norms", model.hidden)
    # Of several stages the first has the embedding and the last the head, one of them each, tied or not.
    add("embedding", rows)
    if shape.pipeline == 1 and not model.tied:
        add("head", rows)
    if model.vision is not None:
        add("vision", vision_parameters(model.vision))
    return parts


def weight_bytes(replica: Replica) -> Mapping[str, float]:
    """Bytes of weights on the fullest device, by part.

    A vision encoder is on every device of the first stage, whole, in 16 bits: engines run it data-parallel and do
    not quantise it.
    """
    parts = _by_part(replica.model, replica.shape, replica.habits)
    return {name: value * part_dtype(name, replica.precision).bytes_per_element for name, value in parts.items()}


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
