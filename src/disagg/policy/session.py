"""Session affinity: requests of a session go to one instance, as long as that one is not overloaded."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from disagg.policy.base import Facts, Need, Snapshot
from disagg.policy.load import loads
from disagg.policy.stable_hash import unit_hash

OVERLOAD = 1.25
"""An instance is overloaded with more than this times the average number of requests."""
ALWAYS_ROOM = 4
"""So many requests are never an overload: among idle instances two requests would be one."""


class SessionAffinity:
    """The session's home; the next in its own order of homes if that has too much to do; least-loaded without one.

    Each session has its own order of the instances by hash (rendezvous hashing). When an instance leaves, its
    sessions move on to their second choice, and when one comes, it takes over its share: no other session moves.
    """

    needs = frozenset({Need.LOAD, Need.SESSION})

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """Above 1/2 in the session's order where there is room, below 1/2 in the same order where there is not."""
        busy = loads(candidates)
        session = facts.session
        if not session:
            return [1.0 / (1.0 + load) for load in busy]
        room = max(ALWAYS_ROOM, ceil(OVERLOAD * (sum(busy) + 1) / len(candidates)))
        return [
            unit_hash(b"%b\0%b" % (session, c.name.encode())) / 2 + (0.5 if load < room else 0.0)
            for c, load in zip(candidates, busy, strict=True)
        ]
