"""What the fields of each family of models mean."""

from __future__ import annotations

import pytest

from disagg.catalog.hf_config import model_from_config
from disagg.catalog.model import (
    Block,
    DenseMlp,
    LatentAttention,
    LinearAttention,
    Model,
    MoeMlp,
    SoftmaxAttention,
    SparseIndexer,
)
from disagg.catalog.models import find_model, model_entries
from disagg.errors import ConfigError

BASE: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


def read(**fields: object) -> Model:
    return model_from_config(BASE | fields, name="m", source="config.json")


def windows(model: Model) -> dict[int | None, int]:
    """Number of layers by window."""
    found: dict[int | None, int] = {}
    for block in model.blocks:
        assert isinstance(block.attention, SoftmaxAttention)
        found[block.attention.window] = found.get(block.attention.window, 0) + block.count
    return found


def mixtures(model: Model) -> tuple[int, int]:
    """Numbers of dense layers and of mixtures."""
    counts = [0, 0]
    for block in model.blocks:
        counts[isinstance(block.mlp, MoeMlp)] += block.count
    return counts[0], counts[1]


def test_grouped_queries() -> None:
    """A llama: head width is the stream's over the heads, KV heads are fewer, feed-forward layers are gated."""
    attention = SoftmaxAttention(heads=8, kv_heads=2, head_dim=64, value_dim=64)
    assert read().blocks == (Block(4, attention, DenseMlp(1024)),)


def test_heads_that_are_wider_than_the_stream() -> None:
    """`head_dim` wins over the division: Qwen3 and Mistral Nemo have heads that do not add up to the stream."""
    attention = read(head_dim=128).blocks[0].attention
    assert isinstance(attention, SoftmaxAttention)
    assert (attention.head_dim, attention.value_dim) == (128, 128)


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"model_type": "falcon", "multi_query": True}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "opt", "ffn_dim": 2048}, 8),
    ],
)
def test_groupings_of_older_models(fields: dict[str, object], kv_heads: int) -> None:
    """MQA is said by `multi_query`, MHA by saying nothing; these have two matrices per feed-forward layer."""
    model = model_from_config(BASE | {"num_key_value_heads": None} | fields, name="m", source="c")
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
    assert isinstance(attention, SoftmaxAttention)
    assert isinstance(mlp, DenseMlp)
    assert (attention.kv_heads, mlp.gated) == (kv_heads, False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 256}, {256: 4}),
        ({"model_type": "mistral", "sliding_window": None}, {None: 4}),
        ({"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": False}, {None: 4}),
        (
            {"model_type": "qwen2", "sliding_window": 256, "use_sliding_window": True, "max_window_layers": 3},
            {None: 3, 256: 1},
        ),
        ({"model_type": "gemma2", "sliding_window": 256}, {256: 2, None: 2}),
        ({"model_type": "gemma3_text", "sliding_window": 256, "num_hidden_layers": 12}, {256: 10, None: 2}),
        ({"model_type": "cohere2", "sliding_window": 256, "sliding_window_pattern": 4}, {256: 3, None: 1}),
        ({"model_type": "exaone4", "sliding_window": 256, "sliding_window_pattern": "LLLG"}, {256: 3, None: 1}),
        (
            {
                "model_type": "olmo3",
                "sliding_window": 256,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            },
            {256: 3, None: 1},
        ),
    ],
)
def test_windows(fields: dict[str, object], expected: dict[int | None, int]) -> None:
    """Each family has its own way of saying which layers are windowed."""
    assert windows(read(**fields)) == expected


def test_chunked_attention_is_a_window_with_a_note() -> None:
    """Llama 4: three of four layers attend within chunks; the model says that this is taken as a window."""
    scout = find_model("llama-4-scout")
    assert windows(scout) == {8192: 36, None: 12}
    assert any("upper bound" in note for note in scout.notes)


@pytest.mark.parametrize(
    ("fields", "dense", "sparse"),
    [
        ({}, 0, 4),
        ({"first_k_dense_replace": 1}, 1, 3),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, 2, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 1, 3),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, 2, 2),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, 2, 2),
        ({"interleave_moe_layer_step": 2}, 2, 2),
        ({"moe_layers": [1]}, 3, 1),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1}, 2, 2),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 2, 2),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 1, 3),
    ],
)
def test_which_layers_are_mixtures(fields: dict[str, object], dense: int, sparse: int) -> None:
    """Each family has its own way of saying which layers have experts."""
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert mixtures(read(**experts, **fields)) == (dense, sparse)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, MoeMlp(8, 2, 1024)),
        (
            {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
             "shared_expert_intermediate_size": 128},
            MoeMlp(8, 2, 64, shared_width=128),
        ),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
             "n_shared_experts": 2},
            MoeMlp(8, 2, 64, shared_width=128),
        ),
        (
            {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2] * 4, "moe_intermediate_size": [64] * 4,
             "num_shared_expert": [1] * 4},
            MoeMlp(8, 2, 64, shared_width=64),
        ),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64,
             "moe_num_shared_experts": 2},
            MoeMlp(8, 2, 64, shared_width=128),
        ),
        ({"model_type": "llama4_text", "num_local_experts": 8, "num_experts_per_tok": 1}, MoeMlp(8, 1, 1024, 1024)),
    ],
)  # fmt: skip
def test_experts(fields: dict[str, object], expected: MoeMlp) -> None:
    """Number, choice and widths of experts, routed and shared, in the words of each family."""
    assert read(**fields).blocks[0].mlp == expected


def test_latent_attention() -> None:
    """DeepSeek-V3: 61 layers, the first three dense; 512 + 64 values cached per token. V3.2 adds an indexer."""
    attention = LatentAttention(128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert find_model("deepseek-v3").blocks == (
        Block(3, attention, DenseMlp(18432)),
        Block(58, attention, MoeMlp(256, 8, 2048, shared_width=2048)),
    )
    sparse = find_model("deepseek-v3.2").blocks[0].attention
    assert isinstance(sparse, LatentAttention)
    assert sparse.indexer == SparseIndexer(heads=64, head_dim=128, topk=2048)
    lite = find_model("deepseek-v2-lite").blocks[0].attention
    assert isinstance(lite, LatentAttention)
    assert lite.q_rank is None


def test_gated_delta_net() -> None:
    """Qwen3-Next: 36 layers with a state of 32 x 128 x 128, 12 of gated attention, all with experts."""
    model = find_model("qwen3-next-80b-a3b")
    linear = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    softmax = SoftmaxAttention(heads=16, kv_heads=2, head_dim=256, value_dim=256, output_gate=True)
    experts = MoeMlp(512, 10, 512, shared_width=512)
    assert model.blocks == (Block(36, linear, experts), Block(12, softmax, experts))


def test_state_in_single_precision() -> None:
    """Qwen3.5 keeps the state in FP32 beside BF16 weights."""
    linear = find_model("qwen3.5-397b-a17b").blocks[0].attention
    assert isinstance(linear, LinearAttention)
    assert linear.state_bytes == 4.0


def test_lightning_attention() -> None:
    """MiniMax-01: seven layers of lightning attention, then one of softmax attention, ten times."""
    model = find_model("minimax-text-01")
    assert [(block.count, type(block.attention)) for block in model.blocks] == [
        (70, LinearAttention),
        (10, SoftmaxAttention),
    ]


def test_lightning_attention_in_both_forms() -> None:
    """The publisher's file has a list of kinds and lists of widths, the library's own form names the kinds."""
    published = dict(model_entries()["minimax-text-01"].config)
    kinds = published["attn_type_list"]
    assert isinstance(kinds, list)
    named = ["full_attention" if kind else "linear_attention" for kind in kinds]
    converted = published | {"model_type": "minimax", "attn_type_list": None, "layer_types": named}
    for config in (published | {"shared_intermediate_size": [0]}, converted):
        assert model_from_config(config, name="m", source="c").blocks == find_model("minimax-text-01").blocks


def test_a_last_layer_of_experts_that_is_not_named() -> None:
    """ERNIE: no end index means up to the last layer; a null head width means the division."""
    config = dict(model_entries()["ernie-4.5-21b-a3b"].config) | {"moe_layer_end_index": None, "head_dim": None}
    assert model_from_config(config, name="m", source="c").blocks == find_model("ernie-4.5-21b-a3b").blocks


def test_layers_that_are_one_thing() -> None:
    """Nemotron 3 Nano: 23 layers of Mamba-2, 23 of experts, 6 of attention, each without the other part."""
    model = find_model("nemotron-3-nano-30b-a3b")
    mamba = LinearAttention(key_heads=8, value_heads=64, key_dim=128, value_dim=64, conv_width=4, state_bytes=4.0)
    experts = MoeMlp(128, 6, 1856, shared_width=3712, gated=False)
    attention = SoftmaxAttention(heads=32, kv_heads=2, head_dim=128, value_dim=128)
    assert model.blocks == (Block(23, mamba, None), Block(23, None, experts), Block(6, attention, None))


def test_mamba_with_feed_forward_parts() -> None:
    """Granite 4 H Small: 36 layers of Mamba-2 and 4 of attention, all with experts."""
    model = find_model("granite-4.0-h-small")
    assert [(b.count, type(b.attention), b.mlp) for b in model.blocks] == [
        (36, LinearAttention, MoeMlp(72, 10, 768, shared_width=1536)),
        (4, SoftmaxAttention, MoeMlp(72, 10, 768, shared_width=1536)),
    ]


def test_what_a_family_does_not_know_is_refused() -> None:
    """A letter or a kind of layer that is not known is a problem, not a guess."""
    with pytest.raises(ConfigError, match="'X'"):
        read(model_type="nemotron_h", hybrid_override_pattern="*X-")
    with pytest.raises(ConfigError, match="'spiral_attention'"):
        read(model_type="olmo3", layer_types=["spiral_attention"] * 4)
