"""Pictures: tokens and arithmetic of their encoding, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from disagg.catalog.model import VisionEncoder
from disagg.cost.plan import Replica, Shape
from disagg.cost.vision import encode, picture_tokens
from disagg.errors import ConfigError
from tests.support.cost_examples import LLAMA_8B, device, ideal

# A ViT of 24 layers of 1024 (openai/clip-vit-large-patch14-336 vision_config), 24 x 24 patches, one token each.
VISION = VisionEncoder(24, 1024, 4096, 16, 14, 336, 576)
SEEING = dataclasses.replace(LLAMA_8B, vision=VISION)


def test_arithmetic_of_one_picture() -> None:
    """576 patches: 24 x 2 x (4 x 1024^2 + 2 x 1024 x 4096) each and 4 x 1024 x 576 for attention, and the patches."""
    found = encode(Replica(SEEING, ideal()), np.asarray(1.0))
    layers = 576 * 24 * (2 * (4 * 1024**2 + 2 * 1024 * 4096) + 4 * 1024 * 576)
    assert float(found.flops) == layers + 576 * 2 * 3 * 14**2 * 1024
    assert float(found.seconds) >= float(found.flops) / 989e12
    assert sum(float(part) for part in found.parts.values()) == pytest.approx(float(found.seconds))


def test_pictures_are_dealt_to_ranks() -> None:
    """Five pictures on four ranks take as long as two on one."""
    many = encode(Replica(SEEING, device(), Shape(4)), np.asarray(5.0))
    two = encode(Replica(SEEING, device()), np.asarray(2.0))
    assert float(many.seconds) == float(two.seconds)


def test_windows_bound_attention() -> None:
    """If all layers attend to windows of 64 patches, attention costs 64 / 576 of it."""
    windowed = dataclasses.replace(SEEING, vision=dataclasses.replace(VISION, window_share=1.0))
    whole = encode(Replica(SEEING, ideal()), np.asarray(1.0))
    less = encode(Replica(windowed, ideal()), np.asarray(1.0))
    assert float(whole.flops - less.flops) == 576 * 24 * 4 * 1024 * (576 - 64)


def test_tokens_scale_with_the_area() -> None:
    """576 for 336 pixels, four times as many for twice the side."""
    assert float(picture_tokens(SEEING)) == 576
    assert picture_tokens(SEEING, np.asarray([336.0, 672.0])).tolist() == [576, 2304]
    small, large = (
        float(encode(Replica(SEEING, device()), np.asarray(1.0), side).seconds) for side in (336.0, 672.0)
    )
    assert large > 2 * small


def test_gates_and_projectors_add_their_products() -> None:
    """A gated feed-forward part has three matrices; a projector works on each token that the language model gets."""
    gated = dataclasses.replace(SEEING, vision=dataclasses.replace(VISION, mlp_gated=True))
    plain = encode(Replica(SEEING, ideal()), np.asarray(1.0))
    more = encode(Replica(gated, ideal()), np.asarray(1.0))
    assert float(more.flops - plain.flops) == 576 * 24 * 2 * 1024 * 4096
    projected = dataclasses.replace(SEEING, vision=dataclasses.replace(VISION, projector_params=4096 * 1000))
    last = encode(Replica(projected, ideal()), np.asarray(1.0))
    assert float(last.flops - plain.flops) == 576 * 2 * 4096 * 1000


def test_a_blind_model_takes_no_pictures() -> None:
    """It is refused rather than taken for free."""
    with pytest.raises(ConfigError, match="has no vision encoder"):
        encode(Replica(LLAMA_8B, device()), np.asarray(1.0))
    with pytest.raises(ConfigError):
        picture_tokens(LLAMA_8B)
