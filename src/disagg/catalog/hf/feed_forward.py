"""Feed-forward layers of a configuration: dense, and mixtures of experts."""

from __future__ import annotations

from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import Habits, hidden_size
from disagg.catalog.model import DenseMlp, Mlp, MoeMlp

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_moe_experts")
_ACTIVE = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_router_topk",
    "moe_top_k",
    "top_k_experts",
)
_DENSE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "inner_dim")


def feed_forward(fields: Fields, habits: Habits, index: int) -> Mlp:
    """The feed-forward part of one layer."""
    if has_experts(fields) and _is_mixture(fields, index):
        return mixture(fields, habits, index)
    return dense(fields, habits)


def dense(fields: Fields, habits: Habits) -> DenseMlp:
    """A dense layer. GPT-like configurations leave the width out where it is four times the stream."""
    if not fields.has(*_DENSE) and fields.text("model_type") in {
        "gpt2",
        "gptj",
        "bloom",
        "falcon",
        "gpt_bigcode",
        "mpt",
    }:
        return DenseMlp(fields.integer("expansion_ratio", default=4) * hidden_size(fields), habits.gated)
    # Where experts have the usual name, the dense layers beside them have one of their own.
    width = fields.maybe("dense_intermediate_size", "intermediate_size_mlp", least=1)
    return DenseMlp(fields.integer(*_DENSE) if width is None else width, habits.gated)


def has_experts(fields: Fields) -> bool:
    """Whether some layer is a mixture of experts."""
    return any((_first(fields, name, 0) or 0) > 1 for name in _EXPERTS)


def mixture(fields: Fields, habits: Habits, index: int) -> MoeMlp:
    """A mixture of experts."""
    experts = next((count for name in _EXPERTS if (count := _first(fields, name, index))), None)
    active = next((count for name in _ACTIVE if (count := _first(fields, name, index))), None)
    if active is None:
        active = fields.integer(*_ACTIVE)
    width = _first(fields, "moe_intermediate_size", index) or fields.integer(
        "expert_intermediate_size", "intermediate_size"
    )
    if experts is not None and active > experts:
        fields.problem(_ACTIVE[0], f"is {active}; there are only {experts} experts")
    return MoeMlp(
        experts=experts or 1,
        active=active,
        width=width,
        shared_width=_shared(fields, index, width),
        gated=habits.gated,
    )


def _shared(fields: Fields, index: int, width: int) -> int:
    """Inner width of all shared experts together."""
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        total = _first(fields, name, index)
        if total is not None:
            return total
    # Ernie names the width of one shared expert by way of their number, Hunyuan gives one number per layer.
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"):
        count = _first(fields, name, index)
        if count is not None:
            return count * fields.integer("moe_shared_expert_intermediate_size", "share_expert_dim", default=width)
    if fields.text("model_type") in {"llama4_text", "llama4"}:
        return width
    if fields.flag("enable_moe_block"):
        return fields.integer("intermediate_size")
    return 0


def _is_mixture(fields: Fields, index: int) -> bool:  # noqa: PLR0911 - one line per way of saying it
    """Whether a layer is a mixture of experts; every family has its own way of saying so."""
    kinds = fields.texts("mlp_layer_types")
    if kinds:
        return index < len(kinds) and kinds[index] != "dense"
    listed = fields.integers("moe_layer_freq")
    if listed is not None:
        return index < len(listed) and bool(listed[index])
    if fields.has("first_k_dense_replace"):
        first = fields.integer("first_k_dense_replace", least=0)
        return index >= first and index % fields.integer("moe_layer_freq", default=1) == 0
    if fields.has("decoder_sparse_step", "mlp_only_layers"):
        step = fields.integer("decoder_sparse_step", default=1)
        return index not in (fields.integers("mlp_only_layers") or ()) and (index + 1) % step == 0
    listed = fields.integers("moe_layers")
    if listed:
        return index in listed
    if fields.has("interleave_moe_layer_step"):
        return (index + 1) % fields.integer("interleave_moe_layer_step") == 0
    if fields.has("moe_layer_start_index"):
        start, end = _first(fields, "moe_layer_start_index", index), _first(fields, "moe_layer_end_index", index)
        period = fields.integer("moe_layer_interval", default=1)
        return (start or 0) <= index <= (index if end is None else end) and (index + 1) % period == 0
    if fields.has("expert_layer_period"):
        return index % fields.integer("expert_layer_period") == fields.integer("expert_layer_offset", least=0)
    if fields.has("moe_layer_num_skipped"):
        return index >= fields.integer("moe_layer_num_skipped", least=0)
    return True


def _first(fields: Fields, name: str, index: int) -> int | None:
    """A field that is one number for all layers or a list with one for each."""
    listed = fields.integers(name)
    if listed is None:
        return fields.maybe(name) if fields.has(name) else None
    return listed[min(index, len(listed) - 1)] if listed else None
