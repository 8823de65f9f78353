"""Arithmetic and traffic of attention with a state of fixed size, on one device."""

from __future__ import annotations

import math

from disagg.catalog.accelerator import Kernel
from disagg.catalog.model import LinearAttention
from disagg.cost.load import Load
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Replica

CHUNK = 64
"""Tokens that a prompt's scan takes at once (the chunk of the published kernels of gated delta nets)."""


def linear_operators(attention: LinearAttention, replica: Replica, load: Load, count: float) -> list[Operator]:
    """Operators of `count` layers (gated delta rule, arXiv 2412.06464).

    Per token and value head the state is read once, corrected by an outer product and queried: 6 d v FLOPs (d width
    of a key, v of a value). A prompt is scanned in chunks, within which tokens also attend to each other:
    2 (d + v) CHUNK / 2 more. The state stays on chip over a chunk, and is read and written once per decode step.
    """
    ranks, precision = replica.shape.attention_tensor, replica.precision
    key_heads, value_heads = math.ceil(attention.key_heads / ranks), math.ceil(attention.value_heads / ranks)
    hidden = replica.model.hidden
    keys, values = key_heads * attention.key_dim, value_heads * attention.value_dim
    wide = 2 * keys + values * (2 if attention.gate else 1) + 2 * value_heads
    weights = precision.dense, precision.activations
    state = value_heads * attention.key_dim * attention.value_dim
    update = 6.0 * state
    inside = value_heads * (attention.key_dim + attention.value_dim) * float(CHUNK)
    vectors = load.tokens * (2 * keys + 2 * values) * ACTIVATION_BYTES
    # A prompt's state goes through memory once per chunk and direction.
    passes = load.prompts * 2.0 * (load.piece / CHUNK + 1.0) + load.sequences * 2.0
    scan = Operator(
        "attention",
        Kernel.PREFILL_ATTENTION,
        Kernel.DECODE_ATTENTION,
        precision.activations,
        precision.activations,
        count,
        (load.tokens * update + load.prompt_tokens * inside) * count,
        (vectors + passes * state * attention.state_bytes) * count,
    )
    operators = [*product("projections", load.tokens, (hidden, wide), count, *weights)]
    if attention.conv_width:
        operators.append(stream("attention", load.tokens * (2 * keys + values) * 2.0 * ACTIVATION_BYTES, count))
    return [*operators, scan, *product("projections", load.tokens, (values, hidden), count, *weights)]
