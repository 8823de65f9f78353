"""The queue's decisions: order, bound, who has to go, and when to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.admission import MAX_RETRY_AFTER_S, Allowance, Pace, WaitingLine


def test_lower_priorities_go_first_and_equals_in_the_order_of_arrival() -> None:
    """Urgent requests overtake; nobody overtakes an equal."""
    line: WaitingLine[str] = WaitingLine(10)
    for ticket, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -5), ("e", 0)):
        assert line.add(ticket, priority) is None
    assert [line.take() for _ in range(6)] == ["d", "b", "e", "a", "c", None]


def test_a_full_line_refuses_the_new_one_unless_it_is_more_urgent() -> None:
    """The least urgent that came last has to go, and an equal never pushes an equal out."""
    line: WaitingLine[str] = WaitingLine(2)
    assert line.add("old", 5) is None
    assert line.add("newer", 5) is None
    assert line.add("equal", 5) == "equal"
    assert line.add("urgent", 1) == "newer"
    assert [line.take(), line.take(), line.take()] == ["urgent", "old", None]


def test_a_line_of_length_zero_lets_nobody_wait() -> None:
    """A queue that is switched off refuses at once, however urgent a request calls itself."""
    line: WaitingLine[str] = WaitingLine(0)
    assert line.add("a", -1000) == "a"
    assert len(line) == 0


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["add", "take", "discard"]), st.integers(-2, 2), st.integers(0, 30))),
)
def test_the_line_agrees_with_a_sorted_list(limit: int, steps: list[tuple[str, int, int]]) -> None:
    """Whatever is added, taken and withdrawn: the same tickets in the same order as a plain sorted list has them."""
    line: WaitingLine[int] = WaitingLine(limit)
    model: list[tuple[int, int]] = []  # (priority, ticket); tickets count up
    for number, (action, priority, which) in enumerate(steps):
        if action == "add":
            model.append((priority, number))
            model.sort()
            gone = model.pop()[1] if len(model) > limit else None
            assert line.add(number, priority) == gone
        elif action == "take":
            assert line.take() == (model.pop(0)[1] if model else None)
        elif model:
            ticket = model.pop(which % len(model))[1]
            assert line.discard(ticket)
            assert not line.discard(ticket)
        assert len(line) == len(model)
        assert all(ticket in line for _, ticket in model)


def test_retry_after_follows_the_pace_at_which_places_become_free() -> None:
    """Two seconds per departure and nine others ahead make twenty seconds."""
    pace = Pace()
    assert pace.retry_after_s(50) == 1, "nothing is known yet"
    pace.begin(100.0)
    for n in range(1, 5):
        pace.departed(100.0 + 2 * n)
    assert pace.retry_after_s(9) == 20
    assert pace.retry_after_s(10_000) == MAX_RETRY_AFTER_S


def test_a_quiet_hour_before_the_line_formed_does_not_count() -> None:
    """Nobody waited, so nobody learned how fast places become free."""
    pace = Pace()
    pace.begin(0.0)
    pace.departed(1.0)
    pace.begin(3600.0)
    pace.departed(3601.0)
    assert pace.retry_after_s(0) == 1


def test_an_allowance_lets_a_minutes_worth_through_and_then_one_at_a_time() -> None:
    """A burst is allowed, the rate over time is not exceeded, and the wait that is told is long enough."""
    bucket = Allowance(60, 0.0)
    assert [bucket.take(0.0) for _ in range(60)] == [0] * 60
    wait_s = bucket.take(0.0)
    assert wait_s == 1
    assert bucket.take(0.5) == 1
    assert bucket.take(0.5 + wait_s) == 0


@given(st.integers(1, 600), st.lists(st.floats(0, 30), max_size=200))
def test_an_allowance_is_never_exceeded(per_minute: int, gaps: list[float]) -> None:
    """In any span of time at most one minute's worth plus what that time fills again passes."""
    bucket = Allowance(per_minute, 0.0)
    now, passed = 0.0, 0
    for gap in gaps:
        now += gap
        passed += bucket.take(now) == 0
        assert passed <= per_minute + now * per_minute / 60 + 1e-6


def test_a_told_wait_is_kept_also_for_slow_rates() -> None:
    """One request per minute: come back in sixty seconds, and then it passes."""
    bucket = Allowance(1, 0.0)
    assert bucket.take(0.0) == 0
    wait_s = bucket.take(0.0)
    assert wait_s == pytest.approx(60, abs=1)
    assert bucket.take(float(wait_s)) == 0
