"""Families whose layers differ in heads or widths."""

from __future__ import annotations

from disagg.catalog.hf.feed_forward import feed_forward
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import Habits, Layer, hidden_size, layer_count
from disagg.catalog.hf.softmax import query_heads, softmax
from disagg.catalog.hf.windows import layer_kind, window
from disagg.catalog.model import DenseMlp, Mlp, MoeMlp, SoftmaxAttention


def mimo_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """MiMo V2: `hybrid_layer_pattern` has 1 for a windowed layer, whose heads have fields of their own."""
    pattern = fields.integers("hybrid_layer_pattern")
    if pattern is None or len(pattern) != layer_count(fields):
        fields.problem("hybrid_layer_pattern", "must list 1 for each windowed layer and 0 for each other one")
        pattern = ()
    head_dim = fields.integer("swa_head_dim", "head_dim")
    windowed = SoftmaxAttention(
        heads=fields.integer("swa_num_attention_heads", "num_attention_heads"),
        kv_heads=fields.integer("swa_num_key_value_heads", "num_key_value_heads"),
        head_dim=head_dim,
        value_dim=fields.integer("swa_v_head_dim", "v_head_dim", default=head_dim),
        window=fields.integer("sliding_window", "sliding_window_size"),
    )
    full = softmax(fields, habits, None)
    return [Layer(windowed if kind else full, feed_forward(fields, habits, i)) for i, kind in enumerate(pattern)]


def gemma4_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Gemma 4: layers that attend to everything have fewer and wider KV heads; experts stand beside a dense part.

    Where values are the keys (`attention_k_eq_v`) the projection of the values is counted all the same.
    """
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.maybe(name):
            fields.problem(name, "layers that share caches or have inputs of their own are not known here")
    heads = query_heads(fields)
    wide = fields.integer("global_head_dim", "head_dim")
    count = fields.integer("num_global_key_value_heads", "num_key_value_heads", default=heads)
    layers = []
    for i in range(layer_count(fields)):
        if layer_kind(fields, i) == "full_attention":
            attention = SoftmaxAttention(heads=heads, kv_heads=count, head_dim=wide, value_dim=wide)
        else:
            attention = softmax(fields, habits, window(fields, i))
        layers.append(Layer(attention, _gemma4_inner(fields, habits, i)))
    return layers


def _gemma4_inner(fields: Fields, habits: Habits, index: int) -> Mlp:
    if not fields.flag("enable_moe_block"):
        return DenseMlp(fields.integer("intermediate_size"), habits.gated)
    inner = feed_forward(fields, habits, index)
    # Every token passes the dense part too, as it would a shared expert.
    return inner if isinstance(inner, MoeMlp) else DenseMlp(fields.integer("intermediate_size"), habits.gated)


def searched_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Nemotron models from architecture search: `block_configs` says for each layer what is left of it."""
    heads, hidden = query_heads(fields), hidden_size(fields)
    width = fields.integer("head_dim", default=max(1, hidden // heads))
    layers = []
    for block in fields.sections("block_configs"):
        attention, inner = block.section("attention"), block.section("ffn")
        if attention is None or inner is None:
            block.problem("attention", "and ffn must both be there")
            continue
        for part in (attention, inner):
            if part.flag("replace_with_linear"):
                part.problem("replace_with_linear", "is not known here")
        mixer = None
        if not attention.flag("no_op"):
            group = attention.integer("n_heads_in_group")
            mixer = SoftmaxAttention(heads, max(1, heads // group), width, width, attention.maybe("window_length"))
        mlp = None if inner.flag("no_op") else DenseMlp(_searched_width(inner, hidden), habits.gated)
        layers.append(Layer(mixer, mlp))
    if not layers:
        fields.problem("block_configs", "is missing; give attention and ffn of each layer")
    return layers


def _searched_width(inner: Fields, hidden: int) -> int:
    """Two thirds of the multiple of the stream, up to a multiple of 256, as in the first Llama."""
    if not inner.has("ffn_mult"):
        inner.problem("ffn_mult", "is missing; give the width of the layer as a multiple of the stream")
    width = int(2 * inner.number("ffn_mult", 1.0) * hidden / 3)
    return -(-width // 256) * 256
