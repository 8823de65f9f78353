"""Parameters by part, counted by hand."""

from __future__ import annotations

from disagg.catalog.models import find_model
from disagg.catalog.params import attention_parameters, count_parameters, vision_parameters


def test_a_dense_model() -> None:
    """Llama-3.1-8B: 4096 wide, 32 layers, 32 / 8 heads of 128, 14336 inside, 128256 words.

    Attention 4096 x (4096 + 2 x 1024) + 4096 x 4096 = 41 943 040 per layer; feed-forward 3 x 4096 x 14336 =
    176 160 768; embedding and head 128256 x 4096 = 525 336 576 each; 65 norms of 4096. Together 8 030 261 248.
    """
    counted = count_parameters(find_model("llama-3.1-8b"))
    assert counted.parts == {
        "embedding": 525_336_576,
        "attention": 32 * 41_943_040,
        "norms": 65 * 4096,
        "mlp": 32 * 176_160_768,
        "head": 525_336_576,
    }
    assert counted.total == 8_030_261_248
    assert counted.active == 8_030_261_248 - 525_336_576


def test_a_tied_head_is_counted_once_and_is_active() -> None:
    """SmolLM2-135M has one table of 49152 x 576 for both ends, which every token multiplies with."""
    counted = count_parameters(find_model("smollm2-135m"))
    assert counted.parts["embedding"] == 49152 * 576
    assert "head" not in counted.parts
    assert counted.active == counted.total


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3, one layer.

    Queries 7168 x 1536 + 1536 x 128 x 192 = 48 758 784; latent 7168 x 576 = 4 128 768; keys and values out of it
    512 x 128 x 256 = 16 777 216; back 128 x 128 x 7168 = 117 440 512. Together 187 105 280.
    """
    model = find_model("deepseek-v3")
    attention = model.blocks[0].attention
    assert attention is not None
    assert attention_parameters(attention, model.hidden) == 187_105_280


def test_active_experts_by_hand() -> None:
    """DeepSeek-V3: of 256 experts of 3 x 7168 x 2048 = 44 040 192 a token passes 8, in 58 layers."""
    counted = count_parameters(find_model("deepseek-v3"))
    assert counted.parts["experts"] == 58 * 256 * 44_040_192
    assert counted.parts["shared_experts"] == 58 * 44_040_192
    idle = 58 * 248 * 44_040_192
    assert counted.active == counted.total - idle - counted.parts["embedding"]


def test_linear_attention_by_hand() -> None:
    """Qwen3-Next, one delta net of 16 key and 32 value heads of 128, 2048 wide.

    In 2048 x (2 x 2048 + 2 x 4096) + 2048 x 2 x 32; back 4096 x 2048; four taps over 2 x 2048 + 4096 channels.
    """
    model = find_model("qwen3-next-80b-a3b")
    attention = model.blocks[0].attention
    assert attention is not None
    assert attention_parameters(attention, 2048) == 2048 * 12288 + 2048 * 64 + 4096 * 2048 + 4 * 8192


def test_a_vision_encoder_by_hand() -> None:
    """CLIP ViT-L/14 of LLaVA 1.5: 24 layers of 4 x 1024^2 + 2 x 1024 x 4096, patches of 3 x 14^2, two matrices on."""
    vision = find_model("llava-1.5-7b").vision
    assert vision is not None
    assert vision.tokens_per_image == (336 // 14) ** 2
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    assert vision_parameters(vision) == 24 * layer + 3 * 196 * 1024 + 1024 * 4096 + 4096 * 4096
