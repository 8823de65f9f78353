"""Pictures: tokens that they become, and seconds of their encoding."""

from __future__ import annotations

import math

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.catalog.model import Model, VisionEncoder
from disagg.catalog.precision import Dtype
from disagg.cost.device import Device
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Replica
from disagg.cost.roofline import estimate
from disagg.cost.work import Array, Estimate
from disagg.errors import ConfigError, Problem

WINDOW_PATCHES = 64.0
"""Patches of one attention window: 8 x 8, Qwen2.5-VL's window_size of 112 pixels at 14 per patch."""


def picture_tokens(model: Model, side: Array | float | None = None) -> Array:
    """Tokens of the language model that a square picture becomes; scales with its area.

    Args:
        model: A model with a vision encoder.
        side: Pixels; the size that the encoder's figures are for if not given.

    Raises:
        ConfigError: If the model takes no pictures.
    """
    vision = _encoder(model)
    scale = 1.0 if side is None else (np.asarray(side, dtype=np.float64) / vision.image) ** 2
    return np.ceil(np.asarray(vision.tokens_per_image * scale, dtype=np.float64))


def encode(replica: Replica, pictures: Array, side: Array | float | None = None) -> Estimate:
    """Price the encoding of pictures that arrive together.

    The encoder is whole on every rank of tensor parallelism, and pictures are dealt out to the ranks; it computes in
    16 bits. Per layer 2 FLOPs per parameter and patch, and 4 h n per patch for attention to n patches (all of the
    picture's, or those of its window).

    Args:
        replica: The encode stage.
        pictures: How many.
        side: Pixels of a square picture; the encoder's own size if not given.

    Raises:
        ConfigError: If the model takes no pictures.
    """
    vision = _encoder(replica.model)
    pixels = np.asarray(vision.image if side is None else side, dtype=np.float64)
    patches = np.ceil(pixels / vision.patch) ** 2
    mine = np.ceil(np.asarray(pictures, dtype=np.float64) / replica.shape.tensor)
    tokens = picture_tokens(replica.model, pixels)
    return estimate(_operators(replica.model, vision, mine, patches, tokens), Device(replica.accelerator))


def _encoder(model: Model) -> VisionEncoder:
    if model.vision is None:
        raise ConfigError([Problem(f"model {model.name}", "has no vision encoder, so it takes no pictures")])
    return model.vision


def _operators(model: Model, vision: VisionEncoder, pictures: Array, patches: Array, tokens: Array) -> list[Operator]:
    rows, count, hidden = pictures * patches, float(vision.layers), vision.hidden
    bf16 = Dtype.BF16
    into = (2 if vision.mlp_gated else 1) * vision.mlp_width
    reach = patches * (1.0 - vision.window_share) + np.minimum(patches, WINDOW_PATCHES) * vision.window_share
    scores = Operator(
        "vision_attention",
        Kernel.PREFILL_ATTENTION,
        Kernel.ELEMENTWISE,
        bf16,
        bf16,
        count,
        rows * reach * (4.0 * hidden * count),
        rows * (4.0 * hidden * ACTIVATION_BYTES * count),
    )
    operators = [
        *product("vision", rows, (3 * vision.patch**2, hidden), 1.0, bf16, bf16),
        *product("vision", rows, (hidden, 3 * hidden), count, bf16, bf16),
        scores,
        *product("vision", rows, (hidden, hidden), count, bf16, bf16),
        *product("vision", rows, (hidden, into), count, bf16, bf16),
        *product("vision", rows, (vision.mlp_width, hidden), count, bf16, bf16),
        stream("vision", rows * ((8.0 * hidden + into + vision.mlp_width) * ACTIVATION_BYTES), count),
    ]
    if vision.projector_params:
        # The projector ends in the width of the language model and works on merged patches.
        inner = math.ceil(vision.projector_params / model.hidden)
        operators += product("projector", pictures * tokens, (inner, model.hidden), 1.0, bf16, bf16)
    return operators
