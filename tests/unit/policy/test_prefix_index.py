"""Who was sent what, bounded, and never confused with another prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.prefix_index import BOUNDARIES, PrefixIndex, prefix_keys


def text(blocks: int, tail: bytes = b"") -> bytes:
    """A prompt of so many whole blocks, each different from the one before."""
    size = BOUNDARIES[blocks - 1] if blocks else 0
    return b"".join(b"%08d" % i for i in range(size // 8)) + tail


@given(common=st.integers(0, 2000), a=st.binary(max_size=2000), b=st.binary(max_size=2000))
def test_keys_are_equal_exactly_as_far_as_prompts_are(common: int, a: bytes, b: bytes) -> None:
    """A key stands for everything from the beginning to its block's end, and for nothing after it."""
    first, second = text(5)[:common] + a, text(5)[:common] + b
    shared = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    keys, others = prefix_keys(b"m", first), prefix_keys(b"m", second)
    same = sum(x == y for x, y in zip(keys, others, strict=False))
    assert same == sum(end <= shared for end in BOUNDARIES)
    assert keys[:same] == others[:same]


def test_another_model_or_salt_shares_nothing() -> None:
    """The KV of the same text is another one under another adapter; a seed is not confused with the text's start."""
    assert set(prefix_keys(b"a", text(3))).isdisjoint(prefix_keys(b"b", text(3)))
    assert set(prefix_keys(b"ab", text(3))).isdisjoint(prefix_keys(b"a", b"b" + text(3)))


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    """Hashes chain: equal text in the middle of two prompts is no common prefix."""
    assert set(prefix_keys(b"", b"x" + text(4)[1:])).isdisjoint(prefix_keys(b"", text(4)))


def test_a_longer_turn_of_a_conversation_matches_all_whole_blocks_of_the_last_one() -> None:
    """And a shorter one matches no more than it has."""
    index = PrefixIndex(100)
    index.record(prefix_keys(b"", text(3, b"tail")), "a")
    assert index.matched(prefix_keys(b"", text(6))) == {"a": BOUNDARIES[2]}
    assert index.matched(prefix_keys(b"", text(2))) == {"a": BOUNDARIES[1]}
    assert index.matched(prefix_keys(b"", b"y" * 5000)) == {}
    assert index.matched([]) == {}


def test_each_instance_matches_what_it_was_sent() -> None:
    """The deepest match of every one of them, not only of the best."""
    index = PrefixIndex(100)
    index.record(prefix_keys(b"", text(2)), "a")
    index.record(prefix_keys(b"", text(5)), "b")
    assert index.matched(prefix_keys(b"", text(9))) == {"a": BOUNDARIES[1], "b": BOUNDARIES[4]}


def test_what_an_instance_was_sent_goes_away_with_it() -> None:
    """A restarted engine has an empty cache, also for prompts that others hold too."""
    index = PrefixIndex(100)
    keys = prefix_keys(b"", text(4))
    index.record(keys, "a")
    index.record(keys, "b")
    index.forget("a")
    assert index.matched(keys) == {"b": BOUNDARIES[3]}
    index.record(keys[:2], "a")
    assert index.matched(keys) == {"a": BOUNDARIES[1], "b": BOUNDARIES[3]}
    index.forget("nobody")


def test_the_index_is_bounded_and_forgets_what_was_not_sent_for_longest() -> None:
    """Of one prompt, its end goes first: a beginning alone is of use, an end alone is not."""
    index = PrefixIndex(6)
    old, hot, new = (prefix_keys(s, text(3)) for s in (b"old", b"hot", b"new"))
    index.record(hot, "a")
    index.record(old, "a")
    index.record(hot, "a")
    index.record(new[:2], "a")
    assert len(index) == 6
    assert index.matched(hot) == {"a": BOUNDARIES[2]}
    assert index.matched(new) == {"a": BOUNDARIES[1]}
    assert index.matched(old) == {"a": BOUNDARIES[0]}


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.sampled_from("abc"), st.booleans()), max_size=60
    ),
    limit=st.integers(1, 12),
)
def test_any_history_stays_in_bounds_and_never_invents(steps: list[tuple[int, int, str, bool]], limit: int) -> None:
    """Whatever is said to match was sent to that instance since it was forgotten last."""
    index = PrefixIndex(limit)
    sent: set[tuple[str, bytes]] = set()
    for prompt, blocks, name, forget in steps:
        keys = prefix_keys(b"%d" % prompt, text(blocks))
        if forget:
            index.forget(name)
            sent = {(n, k) for n, k in sent if n != name}
        else:
            index.record(keys, name)
            sent |= {(name, k) for k in keys}
        assert 0 <= len(index) <= limit
        for probe in range(6):
            keys = prefix_keys(b"%d" % probe, text(4))
            for found, size in index.matched(keys).items():
                assert (found, keys[BOUNDARIES.index(size)]) in sent
