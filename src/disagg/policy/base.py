"""The contract of a policy, and the one way in which a policy is applied.

::

    snapshots -> filter (ready, not excluded) -> score 0..1 (the policy) -> pick (highest; ties by turn)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, Protocol

NOTHING: Mapping[str, float] = MappingProxyType({})
"""No instance holds any of the prompt."""


class Need(Enum):
    """A fact that costs something to find out. What no policy of a deployment needs is not looked for."""

    LOAD = auto()
    """`Snapshot.foreign`: engines are asked how many requests they have."""
    DRAW = auto()
    """`Facts.draw`."""
    SESSION = auto()
    """`Facts.session`."""
    SENT_PREFIX = auto()
    """`Facts.matched` from what instances were sent before (`disagg.policy.prefix_index`)."""
    HELD_BLOCKS = auto()
    """`Facts.matched` from what engines say that they hold (`disagg.policy.kv_index`)."""


class Snapshot(NamedTuple):
    """One instance at the moment of a decision.

    Attributes:
        name: Unique in its deployment.
        ready: It may be given new work.
        in_flight: Requests that this router has open on it.
        foreign: Requests that it had from others when it was asked last; None if that is not known.
    """

    name: str
    ready: bool
    in_flight: int
    foreign: int | None = None


class Facts(NamedTuple):
    """What a policy may know about the request, and the number of the decision.

    Attributes:
        turn: How many decisions were made before this one; all that a policy has in place of a memory.
        draw: A number from 0 (included) to 1 (excluded), in place of randomness of its own.
        session: What the request has in common with others of its session; empty if it has none.
        prompt_tokens: Length of the prompt, counted or estimated; 0 if it is not known.
        matched: How many of these tokens an instance is thought to hold in its cache, by the instance's name.
    """

    turn: int
    draw: float = 0.0
    session: bytes = b""
    prompt_tokens: float = 0.0
    matched: Mapping[str, float] = NOTHING


class Policy(Protocol):
    """Rates instances for one request."""

    needs: frozenset[Need]
    """The facts that it looks at, besides the turn and the requests in flight."""

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        """One score from 0 (worst) to 1 (best) per candidate, in their order.

        Args:
            candidates: At least one instance; all of them may be chosen.
            facts: The request.
        """
        ...


def choose(
    policy: Policy, snapshots: Sequence[Snapshot], facts: Facts, excluded: Collection[str] = ()
) -> Snapshot | None:
    """Apply a policy.

    Args:
        policy: Rates the candidates.
        snapshots: All instances of a stage, in an order that does not change.
        facts: The request.
        excluded: Names that must not be chosen, such as instances that have failed this request already.

    Returns:
        The candidate with the highest score, or None if there is no candidate. Among equals the choice goes round:
        the search begins at `facts.turn`, so that instances with nothing to do are used alike.

    Raises:
        ValueError: If the policy gives a score outside of 0..1, or not one per candidate.
    """
    candidates = [s for s in snapshots if s.ready and s.name not in excluded]
    count = len(candidates)
    if count < 2:
        return candidates[0] if candidates else None
    scores = policy.score(candidates, facts)
    if len(scores) != count:
        raise ValueError(f"{type(policy).__name__} gave {len(scores)} scores for {count} candidates")
    start = facts.turn % count
    best = start
    for step in range(count):
        index = (start + step) % count
        # Written so that NaN fails as well.
        if not 0.0 <= scores[index] <= 1.0:
            raise ValueError(
                f"{type(policy).__name__} rated {candidates[index].name} {scores[index]}; scores are from 0 to 1"
            )
        if scores[index] > scores[best]:
            best = index
    return candidates[best]
