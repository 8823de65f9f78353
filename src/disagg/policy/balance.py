"""Policies that spread load and know nothing about prompts."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.policy.base import Facts, Need, Snapshot
from disagg.policy.load import loads


class RoundRobin:
    """One after the other. A failed or draining instance is left out, and the others share its turns."""

    needs: frozenset[Need] = frozenset()

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 for the instance whose turn it is."""
        turn = facts.turn % len(candidates)
        return [float(index == turn) for index in range(len(candidates))]


class Random:
    """Any, all alike."""

    needs = frozenset({Need.DRAW})

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 for the instance that was drawn."""
        drawn = int(facts.draw * len(candidates))
        return [float(index == drawn) for index in range(len(candidates))]


class LeastLoaded:
    """The instance with the fewest requests."""

    needs = frozenset({Need.LOAD})

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 for an idle instance, 1/2 for one request, 1/3 for two."""
        del facts
        return [1.0 / (1.0 + load) for load in loads(candidates)]


class PowerOfTwo:
    """Of two that were drawn, the one with fewer requests.

    Several routers that see the same loads do not all choose the same instance, as they would with least-loaded.
    """

    needs = frozenset({Need.DRAW, Need.LOAD})

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """As least-loaded for the two that were drawn, 0 for all others."""
        count = len(candidates)
        if count == 1:
            return [1.0]
        # One number gives both: its whole part the first, what is left of it the second among the others.
        scaled = facts.draw * count
        first = int(scaled)
        second = int((scaled - first) * (count - 1))
        second += second >= first
        busy = loads(candidates)
        scores = [0.0] * count
        scores[first] = 1.0 / (1.0 + busy[first])
        scores[second] = 1.0 / (1.0 + busy[second])
        return scores
