"""What comes before and after the layers: embedding, head, sampling; and the norms between."""

from __future__ import annotations

import math

from disagg.cost.load import Load
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Replica

SAMPLING_PASSES = 2.0
"""Times that a sampler reads the logits of a token: for their maximum and for their sum."""


def norm_operators(replica: Replica, load: Load, count: float) -> list[Operator]:
    """`count` norms, each fused with the residual sum: two vectors read, two written."""
    return [stream("norms", load.tokens * (4.0 * replica.model.hidden * ACTIVATION_BYTES), count)]


def embedding_operators(replica: Replica, load: Load) -> list[Operator]:
    """Rows of the embedding: one read and one write per token."""
    return [stream("embedding", load.tokens * (2.0 * replica.model.hidden * ACTIVATION_BYTES), 1.0)]


def head_operators(replica: Replica, load: Load) -> list[Operator]:
    """Logits of the tokens that need them, 2 h V FLOPs each, and sampling from them.

    The rows of the vocabulary are spread over the tensor-parallel ranks; the sampler reads gathered logits.
    """
    model, precision = replica.model, replica.precision
    rows = math.ceil(model.vocabulary / replica.shape.tensor)
    sampled = load.logits * (model.vocabulary * ACTIVATION_BYTES)
    return [
        stream("norms", load.logits * (4.0 * model.hidden * ACTIVATION_BYTES), 1.0),
        *product("head", load.logits, (model.hidden, rows), 1.0, precision.head, precision.activations),
        stream("sampling", sampled, SAMPLING_PASSES),
    ]
