"""What a model is, in words for tables."""

from __future__ import annotations

from disagg.catalog.model import (
    Attention,
    DenseMlp,
    LatentAttention,
    LinearAttention,
    Mlp,
    Model,
    MoeMlp,
    SoftmaxAttention,
)


def attention_words(attention: Attention) -> str:
    """One kind of attention: `GQA 32/8 x 128`."""
    match attention:
        case SoftmaxAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window):
            grouping = "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
            within = f", window {window}" if window is not None else ""
            return f"{grouping} {heads}/{kv_heads} x {head_dim}{within}"
        case LatentAttention(heads=heads, kv_rank=kv_rank, rope_dim=rope_dim, indexer=indexer):
            sparse = f", top {indexer.topk} of an indexer" if indexer is not None else ""
            return f"MLA {heads} x ({kv_rank} + {rope_dim}){sparse}"
        case LinearAttention(value_heads=heads, key_dim=key_dim, value_dim=value_dim):
            return f"linear, state {heads} x {key_dim} x {value_dim}"


def mlp_words(mlp: Mlp) -> str:
    """One kind of feed-forward part: `8 of 256 experts x 2048`."""
    match mlp:
        case DenseMlp(width=width, gated=gated):
            return f"dense {width}{'' if gated else ', two matrices'}"
        case MoeMlp(experts=experts, active=active, width=width, shared_width=shared):
            beside = f" + shared {shared}" if shared else ""
            return f"{active} of {experts} experts x {width}{beside}"


def layers_words(model: Model) -> tuple[str, ...]:
    """The layers, one line for each kind."""
    lines = []
    for block in model.blocks:
        parts = [attention_words(block.attention)] if block.attention is not None else []
        if block.mlp is not None:
            parts.append(mlp_words(block.mlp))
        lines.append(f"{block.count} x {'; '.join(parts)}")
    return tuple(lines)


def kind_words(model: Model) -> str:
    """The model in a few words: `MLA, 8/256 experts`."""
    mixers = dict.fromkeys(_kind(block.attention) for block in model.blocks if block.attention is not None)
    experts = next((block.mlp for block in model.blocks if isinstance(block.mlp, MoeMlp)), None)
    inner = "dense" if experts is None else f"{experts.active}/{experts.experts} experts"
    return f"{' + '.join(mixers)}, {inner}{', vision' if model.vision is not None else ''}"


def _kind(attention: Attention) -> str:
    match attention:
        case SoftmaxAttention(window=None):
            return attention_words(attention).split()[0]
        case SoftmaxAttention():
            return "window"
        case LatentAttention(indexer=indexer):
            return "MLA" if indexer is None else "sparse MLA"
        case LinearAttention():
            return "linear"


def count_words(count: float) -> str:
    """A number of parameters: `135M`, `8.03B`, `1.03T`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"
