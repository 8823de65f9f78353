"""How many parameters a model has, by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model.

    Attributes:
        parts: By part: embedding, attention, mlp, experts, shared_experts, router, norms, head, vision. Parts that a
            model does not have are absent; a tied head is counted as embedding.
        active: Those that one token passes: of the experts its own, and the head, but not the embedding (of which it
            reads one row) nor the vision encoder.
    """

    parts: Mapping[str, int]
    active: int

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return sum(self.parts.values())


def count_parameters(model: Model) -> Parameters:
    """Parameters of the whole model.

    Layers of multi-token prediction and learned positions are not counted.
    """
    parts: dict[str, int] = {}

    def add(name: str, value: int) -> None:
        if value:
            parts[name] = parts.get(name, 0) + value

    hidden = model.hidden
    add("embedding", model.vocabulary * hidden)
    idle = 0
    for block in model.blocks:
        if block.attention is not None:
            add("attention", block.count * attention_parameters(block.attention, hidden))
        if block.mlp is not None:
            for name, value in mlp_parameters(block.mlp, hidden).items():
                add(name, block.count * value)
        if isinstance(block.mlp, MoeMlp):
            idle += block.count * (block.mlp.experts - block.mlp.active) * _expert(block.mlp, hidden)
        add("norms", block.count * hidden * ((block.attention is not None) + (block.mlp is not None)))
    add("norms", hidden)
    add("head", 0 if model.tied else model.vocabulary * hidden)
    language = sum(parts.values())
    add("vision", vision_parameters(model.vision) if model.vision is not None else 0)
    return Parameters(parts, language - idle - (0 if model.tied else parts["embedding"]))


def attention_parameters(attention: Attention, hidden: int) -> int:
    """Parameters of one layer's mixer."""
    match attention:
        case SoftmaxAttention():
            queries = attention.heads * attention.head_dim
            values = attention.heads * attention.value_dim
            cached = attention.kv_heads * (attention.head_dim + attention.value_dim)
            biases = queries + cached if attention.bias else 0
            gate = hidden * values if attention.output_gate else 0
            return hidden * (queries + cached + values) + biases + gate
        case LatentAttention():
            return _latent(attention, hidden)
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            into = 2 * keys + values * (2 if attention.gate else 1)
            # One or two numbers per head and token: the decay, and for delta nets the writing strength.
            steps = 0 if attention.conv_width == 0 else 2 * attention.value_heads
            return hidden * (into + steps + values) + attention.conv_width * (2 * keys + values)


def _latent(attention: LatentAttention, hidden: int) -> int:
    query = attention.heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.q_rank
    asked = hidden * query if rank is None else rank * (hidden + query)
    cached = hidden * (attention.kv_rank + attention.rope_dim)
    lifted = attention.kv_rank * attention.heads * (attention.nope_dim + attention.value_dim)
    back = attention.heads * attention.value_dim * hidden
    chooser = attention.indexer
    chosen = 0
    if chooser is not None:
        chosen = (rank or hidden) * chooser.heads * chooser.head_dim + hidden * (chooser.head_dim + chooser.heads)
    return asked + cached + lifted + back + chosen


def mlp_parameters(mlp: Mlp, hidden: int) -> Mapping[str, int]:
    """Parameters of one layer's feed-forward part, by part."""
    match mlp:
        case DenseMlp():
            return {"mlp": _matrices(mlp.gated) * hidden * mlp.width}
        case MoeMlp():
            return {
                "experts": mlp.experts * _expert(mlp, hidden),
                "shared_experts": _matrices(mlp.gated) * hidden * mlp.shared_width,
                "router": hidden * mlp.experts,
            }


def _expert(mlp: MoeMlp, hidden: int) -> int:
    return _matrices(mlp.gated) * hidden * mlp.width


def _matrices(gated: bool) -> int:
    return 3 if gated else 2


def vision_parameters(vision: VisionEncoder) -> int:
    """Parameters of a vision encoder with its projector: attention is 4 h^2 per layer."""
    layer = 4 * vision.hidden**2 + _matrices(vision.mlp_gated) * vision.hidden * vision.mlp_width
    patches = 3 * vision.patch**2 * vision.hidden
    return vision.layers * layer + patches + vision.projector_params
