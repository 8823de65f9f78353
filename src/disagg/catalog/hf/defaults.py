"""What the configuration classes of `transformers` assume for fields that a file leaves out.

Files of models of several parts are written without the fields that have their default (google/gemma-3-4b-it names
neither heads nor vocabulary). Files of one part have all fields, so defaults are only taken below the first level.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "image_size": 224,
    },
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 32,
        "image_size": 224,
    },
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
        "image_size": 1024,
    },
    "idefics3_vision": {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "patch_size": 32,
        "image_size": 224,
    },
}
"""Defaults by `model_type` of a part."""

# Written by a class of the same defaults under another name.
_ALIASES = {"smolvlm_vision": "idefics3_vision", "idefics3": "idefics3_vision"}


def defaults_for(kind: str) -> Mapping[str, int]:
    """Defaults of a part's class; none where its files are complete."""
    return DEFAULTS.get(_ALIASES.get(kind, kind), {})
