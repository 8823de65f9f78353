"""Bytes of the KV cache: per token, per sequence, per device, and of a request that changes hands."""

from __future__ import annotations

import math

import numpy as np

from disagg.catalog.model import Attention, LatentAttention, LinearAttention, Model, SoftmaxAttention
from disagg.catalog.precision import Dtype
from disagg.cost.attention import local_heads
from disagg.cost.plan import Replica, Shape
from disagg.cost.work import Array

ALONE = Shape()


def token_bytes(attention: Attention | None, dtype: Dtype, shape: Shape = ALONE) -> float:
    """Bytes that one more token takes in one layer on one rank, within the window if there is one.

    Softmax attention: K (d + v) elements, 2 K d with equal widths, of the rank's KV heads (at least one). Latent
    attention: latent and rotary key, whole on every rank of tensor parallelism, and the chooser's key where there
    is one. A state of fixed size grows by nothing. Ranks that share a cache each hold a part of the tokens.
    """
    match attention:
        case SoftmaxAttention():
            _, heads = local_heads(attention, shape.attention_tensor, shape.context)
            elements = float(heads * (attention.head_dim + attention.value_dim))
        case LatentAttention():
            elements = float(attention.kv_rank + attention.rope_dim)
            if attention.indexer is not None:
                elements += attention.indexer.head_dim
        case _:
            return 0.0
    return elements * dtype.bytes_per_element / shape.context


def state_bytes(attention: Attention | None, shape: Shape = ALONE) -> float:
    """Bytes of one sequence's state of fixed size in one layer on one rank.

    One key_dim x value_dim matrix per value head, and the inputs of the short convolution but the newest.
    """
    if not isinstance(attention, LinearAttention):
        return 0.0
    ranks = shape.attention_tensor
    keys, values = math.ceil(attention.key_heads / ranks), math.ceil(attention.value_heads / ranks)
    matrix = values * attention.key_dim * attention.value_dim
    channels = 2 * keys * attention.key_dim + values * attention.value_dim
    return (matrix + channels * max(attention.conv_width - 1, 0)) * attention.state_bytes


def _window(attention: Attention | None) -> int | None:
    return attention.window if isinstance(attention, SoftmaxAttention) else None


def sequence_bytes(model: Model, dtype: Dtype, tokens: Array | float, shape: Shape = ALONE, block: int = 0) -> Array:
    """Bytes of one sequence's cache in all layers, on one of the ranks that share it.

    Args:
        model: The model.
        dtype: Format of the cache.
        tokens: Tokens in the cache.
        shape: How the replica is spread; pipeline stages are not told apart here. All on one device by default.
        block: Tokens of a block that the cache is given out in; 0 for none.

    Returns:
        Bytes, shape of `tokens`. Windowed layers hold the window at most.
    """
    held = in_blocks(tokens, block)
    total = np.zeros(np.shape(held))
    for part in model.blocks:
        window = _window(part.attention)
        kept = held if window is None else np.minimum(held, in_blocks(float(window), block))
        each = kept * token_bytes(part.attention, dtype, shape) + state_bytes(part.attention, shape)
        total = total + part.count * each
    return total


def in_blocks(tokens: Array | float, block: int) -> Array:
    """Tokens rounded up to whole blocks."""
    held = np.asarray(tokens, dtype=np.float64)
    return held if block <= 1 else np.ceil(held / block) * block


def stage_share(model: Model, stages: int) -> float:
    """Share of the layers that the fullest pipeline stage has: ceil(L / stages) / L."""
    return math.ceil(model.layers / stages) / model.layers


def device_sequence_bytes(replica: Replica, tokens: Array | float, block: int = 0) -> Array:
    """Bytes of one sequence's cache on one device that holds it: a rank of the fullest stage."""
    whole = sequence_bytes(replica.model, replica.precision.kv, tokens, replica.shape, block)
    return whole * stage_share(replica.model, replica.shape.pipeline)


def request_bytes(model: Model, dtype: Dtype, tokens: Array | float, block: int = 0) -> Array:
    """Bytes of one request's cache, each element once: what a handoff has to carry in all."""
    return sequence_bytes(model, dtype, tokens, ALONE, block)


def request_bytes_per_device(replica: Replica, tokens: Array | float, block: int = 0) -> Array:
    """Bytes of one request's cache that one receiving device takes in.

    Where KV heads or latents are replicated over ranks, each rank receives its copy; the sum over devices may thus
    exceed `request_bytes`.
    """
    return device_sequence_bytes(replica, tokens, block)
