"""How busy instances are, as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.policy.base import Snapshot


def loads(candidates: Sequence[Snapshot]) -> list[float]:
    """Requests on each candidate: this router's own at this moment, and those of others when it was asked last.

    An instance that did not tell is taken to have as many foreign requests as those that did have on average: it is
    neither flooded nor starved because its metrics cannot be read.
    """
    known = [c.foreign for c in candidates if c.foreign is not None]
    if not known:
        return [float(c.in_flight) for c in candidates]
    mean = sum(known) / len(known)
    return [c.in_flight + (mean if c.foreign is None else c.foreign) for c in candidates]


def foreign_requests(polled: int, own: int) -> int:
    """Requests of others in what an engine said.

    Counting them apart keeps a poll useful until the next one: what this router sends and finishes in between is
    known exactly, so it does not give everything to the instance that looked idle at the last poll.

    Args:
        polled: Requests that the engine had, running and waiting.
        own: Requests that this router had open on it at that time.
    """
    return max(0, polled - own)
