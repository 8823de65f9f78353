"""Arithmetic and traffic of softmax attention (MHA, GQA, MQA; full or windowed) on one device."""

from __future__ import annotations

import math

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.catalog.model import SoftmaxAttention
from disagg.cost.load import Load, mean_reach
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Precision, Replica
from disagg.cost.work import Array


def local_heads(attention: SoftmaxAttention, ranks: int, context: int = 1) -> tuple[int, int]:
    """Query heads and KV heads of one rank.

    KV heads are replicated where there are fewer of them than ranks. Ranks that share a sequence's cache compute the
    heads of the whole sharing group, each over its part of the tokens.
    """
    return (
        math.ceil(attention.heads * context / ranks),
        max(1, math.ceil(attention.kv_heads * context / ranks)),
    )


def softmax_operators(attention: SoftmaxAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    """Operators of `count` layers.

    Per token 2 h (H d + K d + K v) FLOPs for the projections to queries, keys and values and 2 h H v for the one
    back (h width of the stream, H query heads, K KV heads, d and v their widths); scores and weighted values cost
    2 H (d + v) FLOPs per token and token attended to (4 H d c with d = v). Each projection is one product.
    """
    precision, ranks = replica.precision, replica.shape.attention_tensor
    heads, kv_heads = local_heads(attention, ranks)
    hidden = replica.model.hidden
    wide = heads * attention.head_dim + kv_heads * (attention.head_dim + attention.value_dim)
    if attention.output_gate:
        wide += heads * attention.value_dim
    into, back = (hidden, wide), (heads * attention.value_dim, hidden)
    rotated = load.tokens * (wide * ACTIVATION_BYTES + 2.0 * heads * attention.head_dim)
    return [
        *product("projections", load.tokens, into, count, precision.dense, precision.activations),
        stream("rotary", rotated, count),
        *_scores(attention, replica, load, count),
        *product("projections", load.tokens, back, count, precision.dense, precision.activations),
    ]


def _scores(attention: SoftmaxAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    shape, precision = replica.shape, replica.precision
    heads, kv_heads = local_heads(attention, shape.attention_tensor, shape.context)
    both = attention.head_dim + attention.value_dim
    kv = kv_heads * both * precision.kv.bytes_per_element
    reach = mean_reach(load.before, load.piece, attention.window)
    kept = load.before if attention.window is None else np.minimum(load.before, attention.window)
    read = load.prompts * (kept + load.piece) * kv / shape.context
    each = load.prompt_tokens * (2.0 * heads * both / shape.context)
    prompt = attention_kernel(
        Kernel.PREFILL_ATTENTION,
        precision,
        count,
        flops=each * reach,
        per_reach=each,
        moved=read + load.prompt_tokens * heads * both * ACTIVATION_BYTES,
    )
    seen = load.context
    if attention.window is not None and replica.habits.windowed_decode:
        seen = np.minimum(seen, attention.window)
    decode = attention_kernel(
        Kernel.DECODE_ATTENTION,
        precision,
        count,
        flops=2.0 * load.decode_tokens * heads * both * seen / shape.context,
        moved=load.sequences * seen * kv / shape.context + load.decode_tokens * heads * both * ACTIVATION_BYTES,
    )
    return [prompt, decode]


REACH_BESIDE = 150.0
"""Tokens that a prompt's token could attend to more in the time that its attention takes beside them (queries, the
first step of the softmax, outputs). The context attention of five GPUs in ai-dynamo/aiconfigurator 0.12 follows
floor + 2 b H d s (s + 300) / rate, where the arithmetic is 2 b H d s^2."""


def attention_kernel(
    kernel: Kernel, precision: Precision, count: float, *, flops: Array, moved: Array, per_reach: Array | float = 0.0
) -> Operator:
    """A kernel over the KV cache, of `count` layers.

    Args:
        kernel: Of prompts or of decoding; both reach the same share of the peak where they are bound by arithmetic.
        precision: Formats.
        count: Layers.
        flops: Arithmetic of one layer.
        moved: Bytes of one layer.
        per_reach: FLOPs for each further token that all the tokens attend to.
    """
    return Operator(
        "attention",
        kernel,
        Kernel.DECODE_ATTENTION,
        precision.kv,
        precision.activations,
        count,
        flops * count,
        moved * count,
        wasted=per_reach * (REACH_BESIDE * count),
    )
