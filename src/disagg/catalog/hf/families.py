"""Which rules read which `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.catalog.hf.feed_forward import feed_forward
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.latent import latent_layers
from disagg.catalog.hf.layer import Habits, Layer, ReadLayers, layer_count
from disagg.catalog.hf.linear import (
    delta_net_layers,
    granite_hybrid_layers,
    jamba_layers,
    lightning_layers,
    nemotron_layers,
)
from disagg.catalog.hf.softmax import softmax
from disagg.catalog.hf.uneven import gemma4_layers, mimo_layers, searched_layers
from disagg.catalog.hf.windows import window


def standard_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """Softmax attention and a feed-forward part, dense or of experts, in each layer."""
    return [
        Layer(softmax(fields, habits, window(fields, i)), feed_forward(fields, habits, i))
        for i in range(layer_count(fields))
    ]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's configuration is read."""

    layers: ReadLayers
    habits: Habits


def _families() -> Mapping[str, Family]:
    table: dict[str, Family] = {}

    def add(names: str, layers: ReadLayers, habits: Habits) -> None:
        for name in names.split():
            table[name] = Family(layers, habits)

    plain = Habits()
    add(
        "llama mistral ministral ministral3 smollm3 granite internlm2 internlm3 exaone exaone4 seed_oss",
        standard_layers,
        plain,
    )
    add(
        "qwen3 qwen3_vl_text phi3 olmo olmo2 olmo3 ernie4_5 hunyuan_v1_dense stablelm apertus", standard_layers, plain
    )
    add(
        "mixtral phimoe qwen3_moe qwen3_vl_moe_text glm4_moe gpt_oss olmoe ernie4_5_moe granitemoe",
        standard_layers,
        plain,
    )
    add(
        "granitemoeshared minimax_m2 hunyuan_v1_moe dots1 llama4_text llama4",
        standard_layers,
        plain,
    )
    add("qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen2_vl qwen2_5_vl mimo", standard_layers, Habits(bias=True))
    add("gemma gemma2 gemma3 gemma3_text cohere cohere2", standard_layers, Habits(tied=True))
    add("glm glm4 chatglm", standard_layers, plain)
    add("opt gpt2 bloom gpt_bigcode mpt", standard_layers, Habits(gated=False, bias=True, tied=True))
    add("gptj", standard_layers, Habits(gated=False, bias=False))
    add("gpt_neox phi", standard_layers, Habits(gated=False, bias=True))
    add("falcon", standard_layers, Habits(gated=False, tied=True))
    add("starcoder2", standard_layers, Habits(gated=False, tied=True))
    add("nemotron arcee", standard_layers, Habits(gated=False))
    add(
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm_moe_dsa glm4_moe_lite",
        latent_layers,
        plain,
    )
    add("qwen3_next qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe", delta_net_layers, plain)
    add("minimax minimax_text_01 minimax_m1", lightning_layers, plain)
    add("nemotron_h", nemotron_layers, Habits(gated=False))
    add("jamba", jamba_layers, Habits(tied=True))
    add("mimo_v2_flash mimo_v2", mimo_layers, plain)
    add("gemma4_text gemma4", gemma4_layers, Habits(tied=True))
    add("nemotron-nas", searched_layers, plain)
    add("granitemoehybrid", granite_hybrid_layers, Habits(tied=True))
    return table


FAMILIES = _families()
"""Families by `model_type`."""
