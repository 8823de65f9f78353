"""Vision encoders of each family."""

from __future__ import annotations

import pytest

from disagg.catalog.models import find_model


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "image", "tokens"),
    [
        # Tokens by hand: patches on a side squared, over the merge squared.
        ("llava-1.5-7b", 24, 1024, 336, 24**2),
        ("gemma-3-27b", 27, 1152, 896, 256),
        ("idefics3-8b", 27, 1152, 364, 26**2 // 4),
        ("smolvlm2-2.2b", 27, 1152, 384, 27**2 // 9),
        ("internvl3-8b", 24, 1024, 448, 32**2 // 4),
        ("llama-4-scout", 34, 1408, 336, 24**2 // 4),
        ("qwen3-vl-8b", 27, 1152, 1024, 64**2 // 4),
        ("qwen2.5-vl-7b", 32, 1280, 1036, 74**2 // 4),
        ("kimi-k2.5", 27, 1152, 1036, 74**2 // 4),
        ("pixtral-12b", 24, 1024, 1024, 64**2),
        ("mistral-small-3.1-24b", 24, 1024, 1540, 110**2 // 4),
    ],
)
def test_encoders(name: str, layers: int, hidden: int, image: int, tokens: int) -> None:
    """Layers, width and the tokens of a picture, in the words of each family."""
    vision = find_model(name).vision
    assert vision is not None
    assert (vision.layers, vision.hidden, vision.image, vision.tokens_per_image) == (layers, hidden, image, tokens)


def test_windows_and_gates_of_an_encoder() -> None:
    """Qwen2.5-VL attends within windows in 28 of 32 layers, and its feed-forward parts are gated."""
    vision = find_model("qwen2.5-vl-7b").vision
    assert vision is not None
    assert (vision.window_share, vision.mlp_gated) == (28 / 32, True)


def test_a_model_of_text_has_none() -> None:
    """Nothing is invented for a model without an encoder."""
    assert find_model("llama-3.1-8b").vision is None
