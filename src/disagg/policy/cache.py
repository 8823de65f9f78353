"""Cache affinity: the instance where a request has the least to wait for and the least to compute."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.policy.base import Facts, Need, Snapshot
from disagg.policy.load import loads

TOKENS_PER_REQUEST = 512
"""Prompt tokens that are in no cache and weigh as much as one more request on an instance."""


class CacheAffinity:
    """Weighs what an instance holds of the prompt against what it has to do, for each request anew.

    A hot instance loses the requests whose cached part is not worth the wait, and only those: there is no switch
    that turns affinity off for all. A prompt that nobody holds goes where the load is least.

    Args:
        source: Where `Facts.matched` comes from.
    """

    def __init__(self, source: Need) -> None:
        self.needs = frozenset({Need.LOAD, source})

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 if there is nothing to wait for and nothing to compute, 1/2 for the work of one request, and so on."""
        matched, prompt = facts.matched, facts.prompt_tokens
        scores = []
        for candidate, load in zip(candidates, loads(candidates), strict=True):
            missing = max(0.0, prompt - matched.get(candidate.name, 0.0))
            scores.append(1.0 / (1.0 + load + missing / TOKENS_PER_REQUEST))
        return scores
