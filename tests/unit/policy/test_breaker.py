"""The circuit breaker: every transition, and what holds after any sequence of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.breaker import Breaker, BreakerRules, Phase

RULES = BreakerRules(failures=3, open_s=5.0, max_open_s=12.0)


def opened(at: float = 100.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(RULES.failures):
        breaker.failed(at, at)
    assert breaker.phase(at) is Phase.OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    """The third failure opens it, and says so once; until then everything is let through."""
    breaker = Breaker(RULES)
    assert [breaker.failed(t, t) for t in (1.0, 2.0, 3.0, 4.0)] == [False, False, True, False]
    assert breaker.phase(3.0) is Phase.OPEN
    assert not breaker.admits(7.9)
    assert breaker.trips == 1


def test_a_success_ends_the_row() -> None:
    """Failures with successes between them never open it, also not those that were shared."""
    breaker = Breaker(RULES)
    for t in range(20):
        breaker.failed(t, t)
        breaker.failed(t, t, partner="other")
        breaker.succeeded(t)
    assert breaker.phase(20.0) is Phase.CLOSED
    assert breaker.streak == 0


def test_half_open_lets_one_trial_through() -> None:
    """When its time is over one request may try; the others wait for its verdict."""
    breaker = opened(at=100.0)
    assert breaker.phase(105.0) is Phase.HALF_OPEN
    assert breaker.admits(105.0)
    assert breaker.began(105.0)
    assert not breaker.admits(106.0)
    assert not breaker.began(106.0)
    breaker.succeeded(105.0)
    assert breaker.phase(107.0) is Phase.CLOSED
    assert breaker.admits(107.0)


def test_each_failed_trial_doubles_the_time_up_to_the_limit() -> None:
    """5 s, 10 s, then 12 s and no more; a success brings the first value back."""
    breaker = opened(at=0.0)
    now = 0.0
    for open_s in (5.0, 10.0, 12.0, 12.0):
        assert not breaker.admits(now + open_s - 0.1)
        now += open_s
        assert breaker.began(now)
        assert breaker.failed(now, now)
    breaker.succeeded(now)
    for _ in range(3):
        breaker.failed(now, now)
    assert breaker.admits(now + 5.0)


def test_a_trial_without_a_verdict_makes_room_for_the_next() -> None:
    """A refusal or a client that left says nothing: the breaker is neither closed nor opened for longer."""
    breaker = opened(at=0.0)
    assert breaker.began(5.0)
    breaker.ended()
    assert breaker.phase(5.0) is Phase.HALF_OPEN
    assert breaker.began(5.0)


def test_a_trial_whose_verdict_follows_keeps_its_place_for_so_long() -> None:
    """Prefill has answered, decode has not used its KV yet: the next trial waits, but not without end."""
    breaker = opened(at=0.0)
    assert breaker.began(5.0)
    breaker.ended(verdict_by=17.0)
    assert not breaker.admits(16.9)
    assert breaker.admits(17.0)


def test_requests_from_before_it_opened_prove_nothing() -> None:
    """A burst that fails late does not open it for longer, and a late success does not close it."""
    breaker = opened(at=100.0)
    assert not breaker.failed(99.0, 106.0)
    breaker.succeeded(99.0)
    assert breaker.phase(101.0) is Phase.OPEN
    assert breaker.admits(105.0)


def test_a_request_sent_although_it_is_open_may_close_it_but_not_lengthen_it() -> None:
    """When all are open one is tried all the same."""
    breaker = opened(at=100.0)
    assert not breaker.began(101.0)
    assert not breaker.failed(101.0, 102.0)
    assert breaker.admits(105.0)
    breaker.succeeded(101.0)
    assert breaker.phase(101.0) is Phase.CLOSED


def test_failures_shared_with_a_guilty_partner_are_taken_back() -> None:
    """Own failures, and those with others, stay."""
    breaker = Breaker(RULES)
    breaker.failed(1.0, 1.0, partner="guilty")
    breaker.failed(1.0, 1.0, partner="other")
    breaker.forgive("guilty")
    breaker.forgive("never-seen")
    assert (breaker.streak, breaker.partners) == (1, 2)
    breaker.failed(1.0, 1.0)
    assert breaker.failed(1.0, 1.0)


def test_it_closes_when_what_opened_it_is_taken_back() -> None:
    """The partner turned out to be at fault; one that failed with others as well stays open."""
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.failed(1.0, 1.0, partner="guilty")
    assert not breaker.admits(2.0)
    breaker.forgive("guilty")
    assert breaker.phase(2.0) is Phase.CLOSED
    breaker = opened()
    breaker.failed(100.0, 106.0, partner="guilty")
    breaker.forgive("guilty")
    assert breaker.tripped


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "shared", "good", "begin", "end", "forgive"]),
        st.floats(0, 4, allow_nan=False),
        st.floats(0, 20, allow_nan=False),
    ),
    max_size=80,
)


@given(EVENTS)
def test_it_always_lets_something_through_in_bounded_time(events: list[tuple[str, float, float]]) -> None:
    """Whatever happens: it opens after its failures at the earliest, and is never shut for longer than its limit."""
    breaker = Breaker(RULES)
    now, bad, trial = 0.0, 0, False
    for kind, step, age in events:
        now += step
        trips = breaker.trips
        if kind in {"fail", "shared"}:
            bad += 1
            said = breaker.failed(now - age, now, "partner" if kind == "shared" else None)
            assert said == (breaker.trips > trips)
            trial = trial and not said
        elif kind == "good":
            breaker.succeeded(now - age)
            trial = trial and breaker.tripped
        elif kind == "begin":
            admitted = breaker.admits(now)
            assert breaker.began(now) == (admitted and breaker.tripped)
            trial = trial or (admitted and breaker.tripped)
        elif kind == "end":
            breaker.ended()
            trial = False
        else:
            breaker.forgive("partner")
            trial = trial and breaker.tripped
        assert breaker.trips <= bad
        assert breaker.trips == 0 or bad >= RULES.failures
        assert breaker.admits(now) == (breaker.phase(now) is Phase.CLOSED or (
            breaker.phase(now) is Phase.HALF_OPEN and not trial
        ))  # fmt: skip
        assert trial or breaker.admits(now + RULES.max_open_s)


@pytest.mark.parametrize("failures", [1, 2, 10])
def test_the_number_of_failures_is_the_operators(failures: int) -> None:
    """One failure may be enough."""
    breaker = Breaker(BreakerRules(failures, 1.0, 1.0))
    assert [breaker.failed(0.0, 0.0) for _ in range(failures)] == [False] * (failures - 1) + [True]
