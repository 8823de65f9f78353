"""`disagg.launch.pairing`: who proves a handoff with whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.launch.pairing import WARMED_PAIRS, Pair, Peer, next_pairs


def peers(stage: str, proven: list[bool]) -> list[Peer]:
    return [Peer(f"{stage}-{i}", f"{stage}{i}", p) for i, p in enumerate(proven)]


def names(pairs: list[tuple[Peer, Peer]]) -> list[Pair]:
    return [(p.name, d.name) for p, d in pairs]


def test_all_instances_prove_themselves_at_once() -> None:
    """2P2D needs two probes, run side by side."""
    pairs = next_pairs(peers("p", [False] * 2), peers("d", [False] * 2), (), {}, ())
    assert names(pairs) == [("p-0", "d-0"), ("p-1", "d-1")]


def test_the_odd_one_out_takes_a_proven_partner() -> None:
    """In 1P2D the second decode instance is tried with the prefill that already works."""
    pairs = next_pairs(peers("p", [True]), peers("d", [True, False]), (), {}, {("p0", "d0")})
    assert names(pairs) == [("p-0", "d-1")]


def test_a_failed_pair_is_tried_with_others_first() -> None:
    """One broken decode instance does not keep its first partner from being proven by another."""
    pairs = next_pairs(peers("p", [False, False]), peers("d", [False, False]), (), {("p0", "d0"): 1}, ())
    assert ("p-0", "d-0") not in names(pairs)
    assert len(pairs) == 2


def test_after_a_failure_proven_partners_decide_whose_fault_it_was() -> None:
    """Two that failed with each other are not tried with each other again while there are better partners."""
    pairs = next_pairs(peers("p", [True, False]), peers("d", [False, True]), (), {("p1", "d0"): 1}, {("p0", "d1")})
    assert sorted(names(pairs)) == [("p-0", "d-0"), ("p-1", "d-1")]


def test_a_failed_pair_is_tried_again_if_there_is_no_other() -> None:
    """In 1P1D the only pair is tried on."""
    assert names(next_pairs(peers("p", [False]), peers("d", [False]), (), {("p0", "d0"): 3}, ())) == [("p-0", "d-0")]


def test_the_remaining_pairs_are_warmed_when_all_are_proven() -> None:
    """The first user of a pair does not wait for its connection."""
    worked = {("p0", "d0"), ("p1", "d1")}
    pairs = next_pairs(peers("p", [True] * 2), peers("d", [True] * 2), (), {}, worked)
    assert names(pairs) == [("p-0", "d-1"), ("p-1", "d-0")]
    assert (
        next_pairs(peers("p", [True] * 2), peers("d", [True] * 2), (), {}, {*worked, ("p0", "d1"), ("p1", "d0")})
        == []
    )


def test_a_pair_that_failed_is_not_warmed_again() -> None:
    """Warming is a courtesy; it does not go on for ever."""
    assert next_pairs(peers("p", [True]), peers("d", [True]), (), {("p0", "d0"): 1}, ()) == []


flags = st.lists(st.booleans(), max_size=8)


@given(flags, flags, st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])))
def test_no_instance_is_in_two_probes(prefill: list[bool], decode: list[bool], busy: set[str]) -> None:
    """A probe reads a counter before and after, so a second one through the same instance would blur it."""
    pairs = next_pairs(peers("p", prefill), peers("d", decode), busy, {}, ())
    used = [x.incarnation for pair in pairs for x in pair]
    assert len(used) == len(set(used))
    assert not busy & set(used)


@given(st.integers(1, 8), st.integers(1, 8))
def test_rounds_prove_everybody_and_warm_a_bounded_number(x: int, y: int) -> None:
    """Any xPyD is proven within max(x, y) rounds, and warming ends."""
    proven: set[str] = set()
    worked: set[Pair] = set()
    rounds = 0
    while True:
        prefill = [Peer(f"p-{i}", f"p{i}", f"p{i}" in proven) for i in range(x)]
        decode = [Peer(f"d-{i}", f"d{i}", f"d{i}" in proven) for i in range(y)]
        pairs = next_pairs(prefill, decode, (), {}, worked)
        if not pairs:
            break
        rounds += 1
        for p, d in pairs:
            proven |= {p.incarnation, d.incarnation}
            worked.add((p.incarnation, d.incarnation))
        if rounds == max(x, y):
            assert len(proven) == x + y
    assert len(proven) == x + y
    assert len(worked) == min(x * y, WARMED_PAIRS)
