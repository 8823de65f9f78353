"""Families whose layers differ in heads or widths."""

from __future__ import annotations

import pytest

from disagg.catalog.hf_config import model_from_config
from disagg.catalog.model import Block, DenseMlp, LinearAttention, MoeMlp, SoftmaxAttention
from disagg.catalog.models import find_model, model_entries
from disagg.errors import ConfigError


def test_windowed_layers_with_heads_of_their_own() -> None:
    """MiMo V2 Flash: 39 windowed layers with 8 KV heads, 9 others with 4; the first layer is dense."""
    model = find_model("mimo-v2-flash")
    full = SoftmaxAttention(heads=64, kv_heads=4, head_dim=192, value_dim=128)
    windowed = SoftmaxAttention(heads=64, kv_heads=8, head_dim=192, value_dim=128, window=128)
    experts = MoeMlp(256, 8, 2048)
    assert model.blocks == (Block(1, full, DenseMlp(16384)), Block(39, windowed, experts), Block(8, full, experts))


def test_wide_heads_where_everything_is_attended_to() -> None:
    """Gemma 4: full layers have 2 KV heads of 512, windowed ones 8 of 256; a dense part stands beside the experts."""
    model = find_model("gemma-4-26b-a4b")
    inner = MoeMlp(128, 8, 704, shared_width=2112)
    assert model.blocks == (
        Block(25, SoftmaxAttention(16, 8, 256, 256, window=1024), inner),
        Block(5, SoftmaxAttention(16, 2, 512, 512), inner),
    )


def test_layers_that_a_search_left() -> None:
    """Nemotron Super 49B: 31 of 80 layers have lost their attention; 5.25 x 8192 x 2 / 3 is a width of 28672."""
    blocks = find_model("llama-3.3-nemotron-super-49b").blocks
    assert sum(block.count for block in blocks if block.attention is None) == 31
    assert Block(48, SoftmaxAttention(64, 8, 128, 128), DenseMlp(28672)) in blocks
    # 0.5 x 8192 x 2 / 3 = 2730.67, up to a multiple of 256.
    assert Block(6, None, DenseMlp(2816)) in blocks


def test_mamba_of_the_first_kind() -> None:
    """Jamba: 4 of 32 layers attend, experts in every other layer, and a note says how Mamba-1 is read."""
    model = find_model("jamba-v0.1")
    mamba = LinearAttention(key_heads=1, value_heads=128, key_dim=16, value_dim=64, conv_width=4)
    assert sum(block.count for block in model.blocks if block.attention == mamba) == 28
    assert sum(block.count for block in model.blocks if isinstance(block.mlp, MoeMlp)) == 16
    assert any("Mamba-1" in note for note in model.notes)


@pytest.mark.parametrize(
    ("name", "section", "damage", "message"),
    [
        ("mimo-v2-flash", "", {"hybrid_layer_pattern": [1, 0]}, "hybrid_layer_pattern"),
        ("gemma-4-26b-a4b", "text_config", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ("llama-3.3-nemotron-super-49b", "", {"block_configs": [{"attention": {"no_op": True}}]}, "ffn"),
        ("llama-3.3-nemotron-super-49b", "", {"block_configs": []}, "is missing"),
        (
            "llama-3.3-nemotron-super-49b",
            "",
            {"block_configs": [{"attention": {"replace_with_linear": True, "n_heads_in_group": 8}, "ffn": {}}]},
            r"replace_with_linear[\s\S]*ffn_mult",
        ),
    ],
)
def test_what_is_not_known_is_refused(name: str, section: str, damage: dict[str, object], message: str) -> None:
    """A layout that the rule does not cover is a problem that names its field."""
    config = dict(model_entries()[name].config)
    if section:
        part = config[section]
        assert isinstance(part, dict)
        damage = {section: part | damage}
    with pytest.raises(ConfigError, match=message):
        model_from_config(config | damage, name="m", source="c")
