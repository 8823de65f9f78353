"""What each load-spreading policy prefers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.balance import LeastLoaded, PowerOfTwo, RoundRobin
from disagg.policy.base import Facts, Snapshot, choose
from disagg.policy.load import foreign_requests, loads


@given(loads=st.lists(st.integers(0, 1000), min_size=1, max_size=9), turn=st.integers(0, 99))
def test_least_loaded_takes_a_minimum(loads: list[int], turn: int) -> None:
    """No other candidate has fewer open requests."""
    chosen = choose(LeastLoaded(), [Snapshot(str(i), True, n) for i, n in enumerate(loads)], Facts(turn))
    assert chosen is not None
    assert chosen.in_flight == min(loads)


def test_round_robin_ignores_load_and_skips_what_is_not_ready() -> None:
    """The ready instances share the turns of one that is not."""
    fleet = [Snapshot("a", True, 50), Snapshot("b", False, 0), Snapshot("c", True, 0)]
    chosen = [choose(RoundRobin(), fleet, Facts(t)) for t in range(4)]
    assert [c.name for c in chosen if c] == ["a", "c", "a", "c"]


def test_requests_of_others_count_as_much_as_our_own() -> None:
    """An instance that another router keeps busy is not idle."""
    fleet = [Snapshot("a", True, 0, foreign=9), Snapshot("b", True, 3, foreign=0)]
    assert choose(LeastLoaded(), fleet, Facts(0)) == fleet[1]


def test_an_instance_that_does_not_tell_is_taken_as_average() -> None:
    """It is neither flooded because it looks idle nor left alone because nothing is known."""
    fleet = [Snapshot("a", True, 1, None), Snapshot("b", True, 0, 4), Snapshot("c", True, 2, 6)]
    assert loads(fleet) == [6.0, 4.0, 8.0]
    assert loads([Snapshot("a", True, 1), Snapshot("b", True, 2)]) == [1.0, 2.0]


@given(polled=st.integers(0, 10_000), own=st.integers(0, 10_000))
def test_an_engines_count_is_split_into_ours_and_others(polled: int, own: int) -> None:
    """What we have there is not counted twice, and others' requests are never fewer than none."""
    assert own + foreign_requests(polled, own) == max(polled, own)


def test_what_is_sent_after_a_poll_counts_at_once() -> None:
    """Eight requests between two polls are spread, although the last poll found one instance idle."""
    in_flight = [0, 0]
    foreign = [0, 4]
    for turn in range(8):
        fleet = [Snapshot(str(i), True, in_flight[i], foreign[i]) for i in range(2)]
        chosen = choose(LeastLoaded(), fleet, Facts(turn))
        assert chosen is not None
        in_flight[int(chosen.name)] += 1
    assert in_flight == [6, 2]


@given(
    busy=st.lists(st.integers(0, 100), min_size=2, max_size=9),
    draw=st.floats(0, 1, exclude_max=True),
    turn=st.integers(0, 99),
)
def test_power_of_two_takes_the_less_busy_of_two(busy: list[int], draw: float, turn: int) -> None:
    """Two different instances are rated, and the one with fewer requests is taken: never the busiest of all."""
    fleet = [Snapshot(str(i), True, n) for i, n in enumerate(busy)]
    scores = PowerOfTwo().score(fleet, Facts(turn, draw))
    rated = [i for i, s in enumerate(scores) if s > 0]
    assert len(rated) == 2
    chosen = choose(PowerOfTwo(), fleet, Facts(turn, draw))
    assert chosen is not None
    assert chosen.in_flight == min(busy[i] for i in rated)


def test_power_of_two_draws_every_pair() -> None:
    """No two instances are never compared, or only one of them would ever be relieved."""
    fleet = [Snapshot(str(i), True, 0) for i in range(4)]
    pairs = set()
    for i in range(400):
        scores = PowerOfTwo().score(fleet, Facts(0, i / 400))
        pairs.add(tuple(j for j, s in enumerate(scores) if s > 0))
    assert len(pairs) == 6
