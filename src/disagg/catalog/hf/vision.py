"""The vision encoder of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.catalog.hf.defaults import defaults_for
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import hidden_size
from disagg.catalog.model import VisionEncoder

# Encoders that take any size have no size of their own; a picture of about this side stands for them.
_SIDE = 1024


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the parts of an encoder's configuration have in common."""

    hidden: int
    patch: int
    merge: int
    image: int
    out: int

    @property
    def tokens(self) -> int:
        return max(1, (self.image // self.patch) ** 2 // self.merge**2)


def vision_encoder(fields: Fields, text: Fields) -> VisionEncoder | None:
    """The encoder; None for a model without one."""
    given = fields.section("vision_config")
    if given is None:
        return None
    vision = given.filled(defaults_for(given.text("model_type")))
    layers = vision.integer("num_hidden_layers", "depth", "vt_num_hidden_layers", "num_layers")
    hidden = vision.integer("embed_dim", "vt_hidden_size", "hidden_size", "embedding_size")
    patch = vision.integer("patch_size")
    merge = _merge(fields, vision)
    image = _image(fields, vision, patch * merge)
    sizes = _Sizes(hidden, patch, merge, image, hidden_size(text))
    return VisionEncoder(
        layers=layers,
        hidden=hidden,
        mlp_width=_mlp_width(vision, hidden),
        heads=vision.integer("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        patch=patch,
        image=image,
        tokens_per_image=_tokens(fields, sizes),
        mlp_gated=vision.text("model_type") in {"qwen2_5_vl", "pixtral"} or _kind(fields) == "qwen2_5_vl",
        window_share=_window_share(vision, layers),
        projector_params=_projector(fields, vision, sizes),
    )


def _kind(fields: Fields) -> str:
    return fields.text("model_type")


def _mlp_width(vision: Fields, hidden: int) -> int:
    # Qwen2-VL gives a ratio instead.
    if vision.has("mlp_ratio") and not vision.has("intermediate_size"):
        return int(vision.number("mlp_ratio", 4.0) * hidden)
    return vision.integer("intermediate_size", "vt_intermediate_size", "mlp_dim")


def _merge(fields: Fields, vision: Fields) -> int:
    """Patches on a side that become one token."""
    kernel = vision.integers("merge_kernel_size")
    if kernel:
        return kernel[0]
    pooling = vision.maybe("pooling_kernel_size", least=1)
    if pooling is not None:
        return pooling
    if fields.has("downsample_ratio") or vision.has("pixel_shuffle_ratio"):
        ratio = vision.number("pixel_shuffle_ratio", fields.number("downsample_ratio", 0.5))
        return max(1, round(1 / ratio))
    if _kind(fields) in {"idefics3", "smolvlm"}:
        return fields.integer("scale_factor", default=2)
    return vision.maybe("spatial_merge_size", least=1) or fields.integer("spatial_merge_size", default=1)


def _image(fields: Fields, vision: Fields, cell: int) -> int:
    listed = vision.integers("image_size") or fields.integers("force_image_size")
    if listed:
        return listed[0]
    fixed = fields.maybe("force_image_size", least=1) or vision.maybe("image_size", least=1)
    if fixed is not None:
        return fixed
    return round(_SIDE / cell) * cell


def _tokens(fields: Fields, sizes: _Sizes) -> int:
    fixed = fields.maybe("mm_tokens_per_image", "vision_soft_tokens_per_image", "image_seq_length", least=1)
    # Llava's own field counts the tokens of its usual tile, Idefics3 has no such field.
    return fixed if fixed is not None else sizes.tokens


def _window_share(vision: Fields, layers: int) -> float:
    full = vision.integers("fullatt_block_indexes")
    if full is None or not vision.has("window_size"):
        return 0.0
    return max(0.0, 1 - len(full) / layers)


def _projector(fields: Fields, vision: Fields, sizes: _Sizes) -> int:  # noqa: PLR0911 - one per design
    """Parameters between encoder and language model: matrices only, as biases and norms are small beside them."""
    wide, out = sizes.hidden * sizes.merge**2, sizes.out
    match _kind(fields):
        case kind if kind.startswith("qwen") or kind == "kimi_k25":
            # A merger of two matrices; Qwen3-VL has more of them, for layers whose features go deeper.
            more = len(vision.integers("deepstack_visual_indexes") or ())
            return (1 + more) * (wide * wide + wide * out)
        case "internvl" | "internvl_chat":
            return wide * out + out * out
        case "idefics3" | "smolvlm":
            return wide * out
        case "gemma3" | "gemma4" | "gemma3n" | "paligemma":
            return sizes.hidden * out
        case "llama4":
            inner, middle = vision.integer("projector_input_dim", default=4096), vision.integer("vision_output_dim")
            return sizes.hidden * sizes.merge**2 * inner + inner * middle + middle * out
        case "mistral3":
            return sizes.hidden * wide + sizes.hidden * out + out * out
        case _:
            return sizes.hidden * out + out * out
