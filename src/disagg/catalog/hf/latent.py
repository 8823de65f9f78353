"""Multi-head latent attention of a configuration (DeepSeek V2 and V3, Kimi K2, GLM 5)."""

from __future__ import annotations

from disagg.catalog.hf.feed_forward import feed_forward
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.layer import Habits, Layer, layer_count
from disagg.catalog.hf.softmax import query_heads
from disagg.catalog.model import LatentAttention, SparseIndexer


def latent(fields: Fields) -> LatentAttention:
    """Attention of one layer."""
    indexer = None
    if fields.has("index_topk"):
        indexer = SparseIndexer(
            heads=fields.integer("index_n_heads"),
            head_dim=fields.integer("index_head_dim"),
            topk=fields.integer("index_topk"),
        )
    return LatentAttention(
        heads=query_heads(fields),
        q_rank=fields.maybe("q_lora_rank", least=1),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        indexer=indexer,
    )


def latent_layers(fields: Fields, habits: Habits) -> list[Layer]:
    """All layers."""
    return [Layer(latent(fields), feed_forward(fields, habits, i)) for i in range(layer_count(fields))]
