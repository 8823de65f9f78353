"""Layers whose state has a fixed size: gated delta net, Mamba-2, lightning attention; and models that mix them."""

from __future__ import annotations

from dataclasses import replace

from disagg.catalog.hf.feed_forward import dense, feed_forward, has_experts, mixture
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import Habits, Layer, hidden_size, layer_count
from disagg.catalog.hf.softmax import query_heads, softmax
from disagg.catalog.hf.windows import layer_kind
from disagg.catalog.model import DenseMlp, LinearAttention, SoftmaxAttention


def _state_bytes(fields: Fields) -> float:
    """Bytes per element of a state: of the format that is named for it, else of the model's."""
    name = fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or fields.text("dtype", "torch_dtype")
    return 4.0 if name == "float32" else 2.0


def delta_net(fields: Fields) -> LinearAttention:
    """Gated delta net (Qwen3-Next, Qwen3.5)."""
    return LinearAttention(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4),
        state_bytes=_state_bytes(fields),
    )


def mamba2(fields: Fields) -> LinearAttention:
    """Mamba-2: groups stand for key heads, the state's width for a key's, heads for value heads."""
    head_dim = fields.maybe("mamba_head_dim", "mamba_d_head", least=1)
    heads = fields.integer("mamba_num_heads", "mamba_n_heads")
    if head_dim is None:
        head_dim = fields.integer("mamba_expand", "expand", default=2) * hidden_size(fields) // heads
    return LinearAttention(
        key_heads=fields.integer("n_groups", "mamba_n_groups", default=1),
        value_heads=heads,
        key_dim=fields.integer("ssm_state_size", "mamba_d_state", "mamba_state_size"),
        value_dim=head_dim,
        conv_width=fields.integer("conv_kernel", "mamba_d_conv", default=4),
        state_bytes=_state_bytes(fields),
    )


def lightning(fields: Fields) -> LinearAttention:
    """Lightning attention (MiniMax 01): every head has a state, nothing is convolved, the output is gated."""
    heads = query_heads(fields)
    width = fields.integer("head_dim", default=max(1, hidden_size(fields) // heads))
    return LinearAttention(
        key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv_width=0, state_bytes=4.0
    )


def delta_net_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: three layers of delta net, then one of gated softmax attention."""
    period = fields.integer("full_attention_interval", default=4)
    layers = []
    for i in range(layer_count(fields)):
        kind = layer_kind(fields, i) or ("full_attention" if (i + 1) % period == 0 else "linear_attention")
        mixer = delta_net(fields) if kind == "linear_attention" else _gated(fields, habits)
        layers.append(Layer(mixer, feed_forward(fields, habits, i)))
    return layers


def _gated(fields: Fields, habits: Habits) -> SoftmaxAttention:
    # The code of Qwen3-Next gates always; its configuration does not say so.
    attention = softmax(fields, habits, None)
    return replace(attention, output_gate=fields.flag("attn_output_gate", default=True))


def lightning_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """MiniMax 01: `attn_type_list` has 0 for lightning, 1 for softmax; the newer form uses `layer_types`."""
    kinds = fields.integers("attn_type_list")
    layers = []
    for i in range(layer_count(fields)):
        is_softmax = layer_kind(fields, i) == "full_attention"
        if kinds is not None:
            is_softmax = i < len(kinds) and kinds[i] == 1
        elif not fields.has("layer_types"):
            fields.problem("attn_type_list", "is missing; give 0 for a layer of lightning, 1 for softmax attention")
        mixer = softmax(fields, habits, None) if is_softmax else lightning(fields)
        layers.append(Layer(mixer, feed_forward(fields, habits, i)))
    return layers


def nemotron_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Nemotron-H: each layer is one thing, by the letters M (Mamba-2), * (attention), - (dense) and E (experts)."""
    pattern = fields.text("hybrid_override_pattern")
    if not pattern:
        fields.problem("hybrid_override_pattern", "is missing; give one of the letters M * - E per layer")
    if fields.has("moe_latent_size"):
        fields.problem("moe_latent_size", "experts that work on a narrower stream are not known here")
    layers = []
    for letter in pattern:
        match letter:
            case "M":
                layers.append(Layer(mamba2(fields), None))
            case "*":
                layers.append(Layer(softmax(fields, habits, None), None))
            case "-":
                layers.append(Layer(None, dense(fields, habits)))
            case "E":
                layers.append(Layer(None, mixture(fields, habits, 0)))
            case _:
                fields.problem("hybrid_override_pattern", f"has {letter!r}; known are M * - E")
    return layers


def jamba_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Jamba: one layer of attention in each period, the others Mamba-1; experts in every other layer.

    Mamba-1 has a state per channel and no heads; it reads as Mamba-2 with heads of 64 channels, which has the same
    state and within a few percent the same projections.
    """
    inner = fields.integer("mamba_expand", default=2) * hidden_size(fields)
    mamba = LinearAttention(
        key_heads=1,
        value_heads=max(1, inner // 64),
        key_dim=fields.integer("mamba_d_state", default=16),
        value_dim=64,
        conv_width=fields.integer("mamba_d_conv", default=4),
        state_bytes=_state_bytes(fields),
    )
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
    return [
        Layer(softmax(fields, habits, None) if i % period == offset else mamba, feed_forward(fields, habits, i))
        for i in range(layer_count(fields))
    ]


def granite_hybrid_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Granite 4: `layer_types` says mamba or attention; each layer has a feed-forward part as well."""
    layers = []
    for i in range(layer_count(fields)):
        kind = layer_kind(fields, i)
        if kind not in {"mamba", "attention"}:
            fields.problem("layer_types", f"says {kind!r} of layer {i}; it must be mamba or attention")
        mixer = mamba2(fields) if kind == "mamba" else softmax(fields, habits, None)
        # Its models without experts keep the dense width in the field of the shared expert.
        without = DenseMlp(fields.integer("shared_intermediate_size", "intermediate_size"), habits.gated)
        layers.append(Layer(mixer, feed_forward(fields, habits, i) if has_experts(fields) else without))
    return layers
