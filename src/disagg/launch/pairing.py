"""Which handoffs to try next, so that every instance soon has a partner with which a handoff has worked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

WARMED_PAIRS = 16
"""Pairs that are tried although both sides have a working partner: the first request over a pair would
otherwise pay for its connection. Larger fleets leave the rest to their first requests."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One side of a possible pair.

    Attributes:
        name: The instance.
        incarnation: Its current start.
        proven: A handoff through this incarnation has worked.
    """

    name: str
    incarnation: str
    proven: bool


Pair = tuple[str, str]
"""Incarnations of a prefill and of a decode instance."""


def next_pairs(
    prefill: Sequence[Peer],
    decode: Sequence[Peer],
    busy: Collection[str],
    tries: Mapping[Pair, int],
    worked: Collection[Pair],
) -> list[tuple[Peer, Peer]]:
    """The handoffs to start now; each instance is in one at most, so that a probe measures its own pair.

    An instance that owes a proof is tried with the partner that it has failed with least. When none owes one, pairs
    that were never tried are warmed.

    Args:
        prefill: Prefill instances that answer, in a fixed order.
        decode: Decode instances that answer, in a fixed order.
        busy: Incarnations in a probe that runs now.
        tries: Failed probes by pair.
        worked: Pairs over which a handoff has worked.
    """
    taken = set(busy)
    chosen: list[tuple[Peer, Peer]] = []

    def take(wanted: Callable[[Peer, Peer], bool]) -> None:
        ranked = sorted(
            ((p, d) for p in prefill for d in decode if wanted(p, d)),
            key=lambda pair: _rank(pair, tries, prefill, decode),
        )
        for p, d in ranked:
            if p.incarnation not in taken and d.incarnation not in taken:
                taken.update((p.incarnation, d.incarnation))
                chosen.append((p, d))

    take(lambda p, d: not (p.proven and d.proven))
    if all(peer.proven for peer in (*prefill, *decode)):
        room = WARMED_PAIRS - sum((p.incarnation, d.incarnation) in worked for p in prefill for d in decode)
        take(lambda p, d: (p.incarnation, d.incarnation) not in {*worked, *tries})
        chosen = chosen[: max(0, room)]
    return chosen


def _rank(
    pair: tuple[Peer, Peer], tries: Mapping[Pair, int], prefill: Sequence[Peer], decode: Sequence[Peer]
) -> tuple[int, int, int]:
    p, d = pair
    failed = tries.get((p.incarnation, d.incarnation), 0)
    # Two that both need proof prove each other at once; after a failure, a proven partner tells whose fault it was.
    proven = p.proven + d.proven if failed == 0 else -(p.proven + d.proven)
    # Places counted round, so that 2P2D starts with the pairs 0-0 and 1-1; every failure turns the wheel.
    distance = (decode.index(d) - prefill.index(p) - sum(tries.values())) % max(len(prefill), len(decode))
    return failed, proven, distance
