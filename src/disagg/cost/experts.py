"""Which experts a batch of tokens reaches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disagg.catalog.model import MoeMlp
from disagg.cost.work import Array


def inclusion(experts: int, active: int, skew: float) -> NDArray[np.float64]:
    """Probability of each expert to be among a token's, shape (experts,); they add up to `active`.

    Popularity follows a Zipf law of exponent `skew` (0 for uniform). An expert cannot be chosen twice by a token, so
    that what exceeds probability 1 goes to the others in proportion.
    """
    popularity = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    chosen = np.zeros(experts)
    certain = np.zeros(experts, dtype=bool)
    while True:
        left = active - certain.sum()
        rest = popularity * ~certain
        chosen = np.where(certain, 1.0, left * rest / rest.sum()) if rest.sum() > 0 else certain.astype(np.float64)
        over = (chosen > 1.0) & ~certain
        if not over.any():
            return chosen
        certain |= over


def distinct_experts(mlp: MoeMlp, tokens: Array, skew: float = 0.0) -> Array:
    """Experts that at least one of `tokens` tokens reaches, on average.

    With independent tokens an expert of inclusion probability p is missed by all with (1 - p)^tokens; uniform
    routing gives E (1 - (1 - k / E)^tokens). Shape of the result: that of `tokens`.
    """
    if skew == 0.0:
        reached: Array = mlp.experts * -np.expm1(tokens * _log_miss(mlp.active / mlp.experts))
        return reached
    probability = inclusion(mlp.experts, mlp.active, skew)
    missed = np.exp(np.asarray(tokens, dtype=np.float64)[..., None] * np.log1p(-np.minimum(probability, 1.0 - 1e-12)))
    skewed: Array = mlp.experts - missed.sum(axis=-1)
    return skewed


def _log_miss(probability: float) -> float:
    return float(np.log1p(-min(probability, 1.0 - 1e-12)))
