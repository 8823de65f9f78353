"""The retry budget: a part of the requests of the last ten seconds, and ten in any case."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.budget import FLOOR, WINDOW_S, RetryBudget


def taken(budget: RetryBudget, now: float, tries: int) -> int:
    return sum(budget.take(now) for _ in range(tries))


def test_ten_retries_are_always_there() -> None:
    """Also for the first request after a quiet night, and where the fraction is zero."""
    assert taken(RetryBudget(0.0), 1e6, 50) == FLOOR


def test_it_grows_with_the_requests() -> None:
    """A fifth of 1,000 requests."""
    budget = RetryBudget(0.2)
    for i in range(1000):
        budget.request(50.0 + i / 200)
    assert taken(budget, 55.0, 1000) == 200


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    """Neither requests nor retries."""
    budget = RetryBudget(0.5)
    for _ in range(100):
        budget.request(3.0)
    assert taken(budget, 3.0, 100) == 50
    assert taken(budget, 3.0 + WINDOW_S - 1, 100) == 0
    assert taken(budget, 3.0 + WINDOW_S, 100) == FLOOR
    assert taken(budget, 3.0 + 1000 * WINDOW_S, 100) == FLOOR


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 30, allow_nan=False)), max_size=200), st.floats(0, 1))
def test_it_agrees_with_counting_by_hand(events: list[tuple[bool, float]], fraction: float) -> None:
    """Against a list of all that happened in this second and the nine before it."""
    budget = RetryBudget(fraction)
    now, requests, retries = 0.0, list[int](), list[int]()
    for retry, step in events:
        now += step
        second = int(now)
        if not retry:
            budget.request(now)
            requests.append(second)
            continue
        recent = sum(second - s < WINDOW_S for s in requests)
        allowed = sum(second - s < WINDOW_S for s in retries) < max(FLOOR, fraction * recent)
        assert budget.take(now) == allowed
        if allowed:
            retries.append(second)
