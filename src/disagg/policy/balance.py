"""Policies that spread load and know nothing about prompts."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.policy.base import Facts, Snapshot


class RoundRobin:
    """One after the other. A failed or draining instance is left out, and the others share its turns."""

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 for the instance whose turn it is."""
        turn = facts.turn % len(candidates)
        return [float(index == turn) for index in range(len(candidates))]


class LeastLoaded:
    """The instance with the fewest open requests of this router."""

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """1 for an idle instance, 1/2 for one open request, 1/3 for two."""
        del facts
        return [1.0 / (1 + c.in_flight) for c in candidates]
