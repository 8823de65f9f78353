"""Softmax attention of a configuration: heads and their widths."""

from __future__ import annotations

from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import Habits, hidden_size
from disagg.catalog.model import SoftmaxAttention


def query_heads(fields: Fields) -> int:
    """Number of query heads."""
    return fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")


def softmax(fields: Fields, habits: Habits, window: int | None) -> SoftmaxAttention:
    """Attention of one layer."""
    heads = query_heads(fields)
    head_dim = fields.integer("head_dim", "attention_head_dim", "kv_channels", default=0) or _divided(fields, heads)
    bias = habits.bias if habits.bias is not None else fields.flag("attention_bias", "use_bias", "qkv_bias", "bias")
    return SoftmaxAttention(
        heads=heads,
        kv_heads=kv_heads(fields, heads),
        head_dim=head_dim,
        value_dim=fields.integer("v_head_dim", default=head_dim),
        window=window,
        bias=bias,
        output_gate=fields.flag("attn_output_gate", "attention_output_gate"),
    )


def kv_heads(fields: Fields, heads: int) -> int:
    """Number of key and value heads: as many as queries unless the configuration says otherwise."""
    # Falcon: with the older layout `multi_query` means one head, whatever `num_kv_heads` says.
    if fields.has("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1 if fields.flag("multi_query") else heads
    count = fields.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=heads)
    if count > heads or heads % count:
        fields.problem("num_key_value_heads", f"is {count}; it must divide the {heads} query heads")
    return count


def _divided(fields: Fields, heads: int) -> int:
    hidden = hidden_size(fields)
    if hidden % heads and fields.has("num_attention_heads"):
        fields.problem(
            "head_dim", f"is missing, and hidden_size {hidden} is no multiple of the {heads} heads; give it"
        )
    return max(1, hidden // heads)
