"""Every policy, whatever it prefers, keeps the contract of `disagg.policy.base`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.base import Facts, Need, Snapshot, choose
from disagg.policy.registry import POLICIES, make_policy

NAMES = [f"decode-{i}" for i in range(8)]
snapshots = st.lists(
    st.builds(
        Snapshot,
        st.sampled_from(NAMES) | st.uuids().map(str),
        st.booleans(),
        st.integers(0, 10_000),
        st.none() | st.integers(0, 10_000),
    ),
    max_size=8,
    unique_by=lambda s: s[0],
)
facts = st.builds(
    Facts,
    st.integers(0, 2**40),
    st.floats(0, 1, exclude_max=True),
    st.binary(max_size=20),
    st.floats(0, 1e9),
    st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e9)),
)
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
drawing = sorted(n for n in POLICIES if Need.DRAW in make_policy(n).needs)
not_drawing = sorted(set(POLICIES) - set(drawing))


@every_policy
@given(candidates=snapshots.filter(bool), facts=facts)
def test_scores_are_one_per_candidate_and_in_range(name: str, candidates: list[Snapshot], facts: Facts) -> None:
    """A policy rates every candidate from 0 to 1, and at least one of them above 0."""
    scores = make_policy(name).score(candidates, facts)
    assert len(scores) == len(candidates)
    assert all(0.0 <= s <= 1.0 for s in scores)
    assert max(scores) > 0.0


@every_policy
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


@every_policy
@given(all_of_stage=snapshots, facts=facts)
def test_the_same_arguments_give_the_same_choice(name: str, all_of_stage: list[Snapshot], facts: Facts) -> None:
    """A policy has no memory and no randomness: the simulator gets what the router got."""
    policy = make_policy(name)
    first = choose(policy, all_of_stage, facts)
    choose(policy, all_of_stage, facts._replace(turn=facts.turn + 1, draw=0.5))
    assert choose(policy, all_of_stage, facts) == first
    assert choose(make_policy(name), all_of_stage, facts) == first


@every_policy
@given(all_of_stage=snapshots, facts=facts)
def test_a_policy_looks_only_at_the_facts_that_it_declares(
    name: str, all_of_stage: list[Snapshot], facts: Facts
) -> None:
    """The router finds out nothing else, so nothing else may change the choice."""
    policy = make_policy(name)
    if not policy.needs & {Need.SENT_PREFIX, Need.HELD_BLOCKS}:
        blind = facts._replace(prompt_tokens=0.0, matched={})
        assert choose(policy, all_of_stage, blind) == choose(policy, all_of_stage, facts)
    if Need.SESSION not in policy.needs:
        assert choose(policy, all_of_stage, facts._replace(session=b"")) == choose(policy, all_of_stage, facts)
    if Need.DRAW not in policy.needs:
        assert choose(policy, all_of_stage, facts._replace(draw=0.0)) == choose(policy, all_of_stage, facts)
    if Need.LOAD not in policy.needs:
        bare = [s._replace(foreign=None) for s in all_of_stage]
        chosen, same = choose(policy, bare, facts), choose(policy, all_of_stage, facts)
        assert (chosen and chosen.name) == (same and same.name)


@pytest.mark.parametrize("name", not_drawing)
@given(count=st.integers(1, 9), start=st.integers(0, 2**40))
def test_equal_instances_are_used_alike(name: str, count: int, start: int) -> None:
    """Over one round of decisions, each of several idle instances is chosen once."""
    idle = [Snapshot(str(i), True, 0) for i in range(count)]
    policy = make_policy(name)
    chosen = [choose(policy, idle, Facts(start + i)) for i in range(count)]
    assert sorted(c.name for c in chosen if c is not None) == sorted(s.name for s in idle)


@pytest.mark.parametrize("name", drawing)
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_draws_are_spread_evenly(name: str, count: int) -> None:
    """Even draws give every idle instance its share: chi-square far below what chance would allow."""
    idle = [Snapshot(str(i), True, 0) for i in range(count)]
    policy = make_policy(name)
    rounds = 2520
    hits = dict.fromkeys((s.name for s in idle), 0)
    for i in range(rounds):
        # The golden ratio's multiples fill the range evenly, and no turn has a draw of its own.
        chosen = choose(policy, idle, Facts(turn=i // 7, draw=i * 0.6180339887498949 % 1))
        assert chosen is not None
        hits[chosen.name] += 1
    expected = rounds / count
    assert sum((n - expected) ** 2 / expected for n in hits.values()) < count


@every_policy
def test_a_choice_does_not_depend_on_the_process(name: str) -> None:
    """Two routers, or a router after a restart, send a session to the same instance."""
    code = (
        "from disagg.policy.base import Facts, Snapshot, choose\n"
        "from disagg.policy.registry import make_policy\n"
        "idle = [Snapshot(f'decode-{i}', True, 0) for i in range(7)]\n"
        f"print([choose(make_policy({name!r}), idle, Facts(3, 0.3, str(s).encode()))[0] for s in range(30)])\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
