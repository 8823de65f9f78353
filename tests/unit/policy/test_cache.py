"""Cache affinity weighs what is held against what is waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.base import Facts, Need, Snapshot, choose
from disagg.policy.cache import TOKENS_PER_REQUEST, CacheAffinity

POLICY = CacheAffinity(Need.SENT_PREFIX)


def chosen(fleet: list[Snapshot], prompt: float, matched: dict[str, float], turn: int = 0) -> str:
    found = choose(POLICY, fleet, Facts(turn, prompt_tokens=prompt, matched=matched))
    assert found is not None
    return found.name


def test_among_idle_instances_the_one_that_holds_most_is_taken() -> None:
    """Whatever the turn."""
    idle = [Snapshot(n, True, 0) for n in "abc"]
    for turn in range(3):
        assert chosen(idle, 1000, {"a": 256, "b": 768}, turn) == "b"


def test_a_prompt_that_nobody_holds_goes_where_the_load_is_least() -> None:
    """The busiest instance is not chosen for a cache that it has not."""
    fleet = [Snapshot("a", True, 5), Snapshot("b", True, 0), Snapshot("c", True, 2)]
    assert chosen(fleet, 10_000, {}) == "b"


def test_a_long_cached_part_is_worth_a_wait_and_a_short_one_is_not() -> None:
    """The same hot instance keeps the one request and loses the other, at the same moment."""
    fleet = [Snapshot("hot", True, 6), Snapshot("cool", True, 0)]
    assert chosen(fleet, 8 * TOKENS_PER_REQUEST, {"hot": 8 * TOKENS_PER_REQUEST}) == "hot"
    assert chosen(fleet, TOKENS_PER_REQUEST, {"hot": TOKENS_PER_REQUEST}) == "cool"


def test_one_hot_instance_does_not_take_affinity_from_the_others() -> None:
    """Prompts of the cool ones go on meeting their cache."""
    fleet = [Snapshot("hot", True, 500), Snapshot("b", True, 1), Snapshot("c", True, 1)]
    for turn in range(4):
        assert chosen(fleet, 2048, {"hot": 2048, "c": 1024}, turn) == "c"
        assert chosen(fleet, 2048, {"b": 1024}, turn) == "b"


@given(
    busy=st.lists(st.integers(0, 50), min_size=2, max_size=6),
    prompt=st.integers(1, 100_000),
    data=st.data(),
)
def test_more_in_the_cache_never_makes_an_instance_less_attractive(
    busy: list[int], prompt: int, data: st.DataObject
) -> None:
    """Scores rise with what is held and fall with what is waiting."""
    fleet = [Snapshot(str(i), True, n) for i, n in enumerate(busy)]
    held = {s.name: float(data.draw(st.integers(0, prompt))) for s in fleet}
    before = POLICY.score(fleet, Facts(0, prompt_tokens=prompt, matched=held))
    more = POLICY.score(fleet, Facts(0, prompt_tokens=prompt, matched={**held, "0": float(prompt)}))
    assert more[0] >= before[0]
    assert list(more[1:]) == list(before[1:])
    busier = [fleet[0]._replace(in_flight=busy[0] + 1), *fleet[1:]]
    assert POLICY.score(busier, Facts(0, prompt_tokens=prompt, matched=held))[0] < before[0]
