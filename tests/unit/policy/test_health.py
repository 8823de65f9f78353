"""Hysteresis: how many answers, and which, change what an engine is taken for."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.health import Condition, Finding, Health, HealthRules

RULES = HealthRules(failures=3, successes=2)


def after(*findings: Finding) -> Condition:
    health = Health()
    for finding in findings:
        health.feed(finding, RULES)
    return health.condition


def test_the_first_good_answer_of_a_new_engine_is_enough() -> None:
    """A deployment that starts does not wait for a second question."""
    assert after(Finding.GOOD) is Condition.UP
    assert after(Finding.REFUSED, Finding.SILENT, Finding.GOOD) is Condition.UP


def test_single_missing_answers_change_nothing() -> None:
    """Only a row of them does; one good answer breaks it."""
    up = (Finding.GOOD,)
    assert after(*up, Finding.SILENT, Finding.BAD) is Condition.UP
    assert after(*up, Finding.SILENT, Finding.BAD, Finding.GOOD, Finding.SILENT, Finding.SILENT) is Condition.UP
    assert after(*up, Finding.SILENT, Finding.BAD, Finding.SILENT) is Condition.AWAY


def test_busy_is_not_dead() -> None:
    """However long an engine that goes on with its requests has no time to answer, it stays in."""
    assert after(Finding.GOOD, *[Finding.BUSY] * 50) is Condition.UP


def test_a_refusal_is_believed_at_once() -> None:
    """Where nobody listens, no request can be sent."""
    assert after(Finding.GOOD, Finding.REFUSED) is Condition.GONE


def test_one_that_was_away_has_to_last() -> None:
    """A flapping engine does not come back with its first good answer."""
    away = (Finding.GOOD, *[Finding.SILENT] * 3)
    assert after(*away, Finding.GOOD) is Condition.AWAY
    assert after(*away, Finding.GOOD, Finding.SILENT, Finding.GOOD) is Condition.AWAY
    assert after(*away, Finding.GOOD, Finding.GOOD) is Condition.UP


def test_another_process_is_judged_afresh() -> None:
    """What its predecessor did is not held against it."""
    health = Health()
    for finding in (Finding.GOOD, Finding.REFUSED):
        health.feed(finding, RULES)
    health.restarted()
    health.feed(Finding.GOOD, RULES)
    assert health.condition is Condition.UP


@given(st.lists(st.sampled_from(Finding)), st.integers(1, 5), st.integers(1, 5))
def test_an_engine_is_out_only_for_a_reason_and_in_only_for_one(
    findings: list[Finding], failures: int, successes: int
) -> None:
    """Whatever happened: the condition changes only on the findings that can change it, in their direction."""
    health, rules = Health(), HealthRules(failures, successes)
    for finding in findings:
        before = health.condition
        changed = health.feed(finding, rules)
        assert changed is (health.condition is not before)
        if health.condition is Condition.UP and changed:
            assert finding is Finding.GOOD
        if health.condition in (Condition.AWAY, Condition.GONE) and changed:
            assert finding in (Finding.BAD, Finding.SILENT, Finding.REFUSED)
