"""Arithmetic and traffic of multi-head latent attention on one device."""

from __future__ import annotations

import math

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.catalog.model import LatentAttention
from disagg.cost.attention import attention_kernel
from disagg.cost.load import Load, mean_reach
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Replica
from disagg.cost.work import Array


def latent_operators(attention: LatentAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    """Operators of `count` layers (DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C).

    The products down to the latents are not divided by tensor parallelism, since every rank needs whole latents;
    those up to the heads are. Prompts expand the latents of all tokens that they attend to into keys and values.
    Decode absorbs that expansion into queries and outputs, and attends to the latents themselves: per head
    2 (2 r + p) FLOPs per token attended to (r width of the latent, p of the rotary key), one latent read per token
    whatever the number of heads.
    """
    shape, precision = replica.shape, replica.precision
    heads = math.ceil(attention.heads / shape.attention_tensor)
    hidden, rank, rope = replica.model.hidden, attention.kv_rank, attention.rope_dim
    query = heads * (attention.nope_dim + rope)
    down = rank + rope + (attention.q_rank or 0)
    weights = precision.dense, precision.activations
    expanded = heads * (attention.nope_dim + attention.value_dim)
    # What a prompt attends to is expanded once per piece; a decoding token passes the same weights, absorbed.
    lifted = load.prompts * (load.before + load.piece) + load.decode_tokens
    operators = [
        *product("projections", load.tokens, (hidden, down), count, *weights),
        *product("projections", load.tokens, (attention.q_rank or hidden, query), count, *weights),
        *product("projections", lifted, (rank, expanded), count, *weights),
        stream("rotary", load.tokens * (query + rank + rope) * 2.0 * ACTIVATION_BYTES, count),
    ]
    if attention.indexer is not None:
        operators += _indexer(attention, replica, load, count)
    operators += _scores(attention, replica, load, count)
    back = (heads * attention.value_dim, hidden)
    operators += product("projections", load.tokens, back, count, *weights)
    return operators


def _seen(attention: LatentAttention, load: Load) -> tuple[Array, Array]:
    """Tokens that a prompt's token and a decoding one attend to."""
    if attention.indexer is None:
        return mean_reach(load.before, load.piece, None), load.context
    topk = attention.indexer.topk
    return mean_reach(load.before, load.piece, topk), np.minimum(load.context, topk)


def _scores(attention: LatentAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    shape, precision = replica.shape, replica.precision
    heads = math.ceil(attention.heads * shape.context / shape.attention_tensor)
    rank, rope = attention.kv_rank, attention.rope_dim
    latent = (rank + rope) * precision.kv.bytes_per_element
    reach, seen = _seen(attention, load)
    wide = attention.nope_dim + rope + attention.value_dim
    each = load.prompt_tokens * (2.0 * heads * wide / shape.context)
    prompt = attention_kernel(
        Kernel.PREFILL_ATTENTION,
        precision,
        count,
        flops=each * reach,
        per_reach=each,
        moved=load.prompts * (load.before + load.piece) * latent / shape.context
        + load.prompt_tokens * heads * wide * ACTIVATION_BYTES,
    )
    decode = attention_kernel(
        Kernel.DECODE_ATTENTION,
        precision,
        count,
        flops=2.0 * load.decode_tokens * heads * (2.0 * rank + rope) * seen / shape.context,
        moved=load.sequences * seen * latent / shape.context
        + load.decode_tokens * heads * (2.0 * rank + rope) * ACTIVATION_BYTES,
    )
    return [prompt, decode]


def _indexer(attention: LatentAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    """The chooser of sparse attention: it scores every token of the context with one small key each.

    Its heads are not divided (each rank needs the whole choice). 2 H d FLOPs per token and token of the context.
    """
    chooser, precision = attention.indexer, replica.precision
    if chooser is None:
        return []
    hidden = replica.model.hidden
    key = chooser.head_dim * precision.kv.bytes_per_element
    wide = chooser.heads * chooser.head_dim
    whole = mean_reach(load.before, load.piece, None)
    weights = precision.dense, precision.activations
    return [
        *product("indexer", load.tokens, (attention.q_rank or hidden, wide), count, *weights),
        *product("indexer", load.tokens, (hidden, chooser.head_dim + chooser.heads), count, *weights),
        attention_kernel(
            Kernel.PREFILL_ATTENTION,
            precision,
            count,
            flops=2.0 * load.prompt_tokens * wide * whole,
            moved=load.prompts * (load.before + load.piece) * key,
        ),
        attention_kernel(
            Kernel.DECODE_ATTENTION,
            precision,
            count,
            flops=2.0 * load.decode_tokens * wide * load.context,
            moved=load.sequences * load.context * key,
        ),
    ]
