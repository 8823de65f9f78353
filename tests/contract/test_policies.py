"""Every policy, whatever it prefers, keeps the contract of `disagg.policy.base`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.base import Facts, Snapshot, choose
from disagg.policy.registry import POLICIES, make_policy

snapshots = st.lists(
    st.builds(Snapshot, st.uuids().map(str), st.booleans(), st.integers(0, 10_000)),
    max_size=8,
    unique_by=lambda s: s[0],
)
facts = st.builds(Facts, st.integers(0, 2**40))


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(candidates=snapshots.filter(bool), facts=facts)
def test_scores_are_one_per_candidate_and_in_range(name: str, candidates: list[Snapshot], facts: Facts) -> None:
    """A policy rates every candidate from 0 to 1, and at least one of them above 0."""
    scores = make_policy(name).score(candidates, facts)
    assert len(scores) == len(candidates)
    assert all(0.0 <= s <= 1.0 for s in scores)
    assert max(scores) > 0.0


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(all_of_stage=snapshots, facts=facts, data=st.data())
def test_only_ready_and_not_excluded_instances_are_chosen(
    name: str, all_of_stage: list[Snapshot], facts: Facts, data: st.DataObject
) -> None:
    """Nothing but the filter decides whether there is a choice at all, and it is never overruled."""
    excluded = data.draw(st.sets(st.sampled_from([s.name for s in all_of_stage]))) if all_of_stage else set()
    allowed = [s for s in all_of_stage if s.ready and s.name not in excluded]
    chosen = choose(make_policy(name), all_of_stage, facts, excluded)
    assert (chosen is None) == (not allowed)
    assert chosen is None or chosen in allowed


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(all_of_stage=snapshots, facts=facts)
def test_the_same_arguments_give_the_same_choice(name: str, all_of_stage: list[Snapshot], facts: Facts) -> None:
    """A policy has no memory and no randomness: the simulator gets what the router got."""
    policy = make_policy(name)
    first = choose(policy, all_of_stage, facts)
    choose(policy, all_of_stage, Facts(facts.turn + 1))
    assert choose(policy, all_of_stage, facts) == first
    assert choose(make_policy(name), all_of_stage, facts) == first


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(count=st.integers(1, 9), start=st.integers(0, 2**40))
def test_equal_instances_are_used_alike(name: str, count: int, start: int) -> None:
    """Over one round of decisions, each of several idle instances is chosen once."""
    idle = [Snapshot(str(i), True, 0) for i in range(count)]
    policy = make_policy(name)
    chosen = [choose(policy, idle, Facts(start + i)) for i in range(count)]
    assert sorted(c.name for c in chosen if c is not None) == sorted(s.name for s in idle)
