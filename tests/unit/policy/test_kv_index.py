"""The index holds what an engine that tells the truth has in its cache: checked against a model of such an engine."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.kv_index import Cleared, KvIndex, Prompt, Removed, Stored

GPU = ("GPU", 0)
CPU = ("CPU", 0)


def tokens(*values: int) -> array[int]:
    return array("I", values)


def stored(
    hashes: list[int | bytes],
    ids: list[int],
    parent: int | bytes | None = None,
    size: int = 2,
    place: tuple[str, int] = GPU,
) -> Stored:
    return Stored(place, hashes, parent, tokens(*ids), size, [b""] * len(hashes))


def index(*events: Stored | Removed | Cleared, name: str = "a", rank: int = 0, limit: int = 1000) -> KvIndex:
    made = KvIndex(limit)
    for event in events:
        made.apply(name, rank, event)
    return made


def test_blocks_of_later_events_chain_to_earlier_ones() -> None:
    """By the engine's names, numbers or bytes; only whole blocks from the beginning match."""
    made = index(stored([b"x", b"y"], [1, 2, 3, 4]), stored([7], [5, 6], parent=b"y"))
    assert made.matched(Prompt(tokens(1, 2, 3, 4, 5, 6, 7))) == {"a": 6}
    assert made.matched(Prompt(tokens(1, 2, 3, 4, 5))) == {"a": 4}
    assert made.matched(Prompt(tokens(3, 4, 5, 6))) == {}
    assert made.matched(Prompt(tokens())) == {}


def test_a_missing_block_in_the_middle_ends_the_match() -> None:
    """What follows it is in the cache, and of no use."""
    made = index(stored([1, 2, 3], [1, 2, 3, 4, 5, 6]), Removed(GPU, [2]))
    assert made.matched(Prompt(tokens(1, 2, 3, 4, 5, 6))) == {"a": 2}


def test_each_instance_is_matched_as_far_as_it_goes() -> None:
    """And one that has a later block without the earlier ones is not matched by it."""
    made = index(stored([1, 2, 3], [1, 2, 3, 4, 5, 6]))
    made.apply("b", 0, stored([1, 2, 3], [1, 2, 3, 4, 5, 6]))
    made.apply("b", 0, Removed(GPU, [1]))
    made.apply("c", 0, stored([9], [1, 2]))
    assert made.matched(Prompt(tokens(1, 2, 3, 4, 5, 6))) == {"a": 6, "c": 2}


def test_a_block_whose_parent_is_not_known_is_left_out() -> None:
    """It cannot be compared with a prompt's beginning."""
    made = index(stored([5], [1, 2], parent=4))
    assert made.matched(Prompt(tokens(1, 2))) == {}
    assert len(made) == 0


def test_a_block_is_held_until_its_last_copy_is_gone() -> None:
    """Two requests that computed it at the same time left two, and an offloaded one is a third."""
    block = stored([1], [1, 2])
    twice = index(block, block, Removed(GPU, [1]))
    assert twice.matched(Prompt(tokens(1, 2))) == {"a": 2}
    made = index(block, block, stored([1], [1, 2], place=CPU))
    for event in (Removed(GPU, [1]), Removed(GPU, [1])):
        made.apply("a", 0, event)
        assert made.matched(Prompt(tokens(1, 2))) == {"a": 2}
    made.apply("a", 0, Removed(CPU, [1]))
    assert made.matched(Prompt(tokens(1, 2))) == {}
    made.apply("a", 0, Removed(CPU, [1]))
    assert len(made) == 0


def test_other_adapters_and_salts_are_other_blocks() -> None:
    """The same tokens with something else hashed in; a salt stands in the first block alone."""
    made = index(Stored(GPU, [1, 2], None, tokens(1, 2, 3, 4), 2, [b"lora+salt", b"lora"]))
    assert made.matched(Prompt(tokens(1, 2, 3, 4), b"lora+salt", b"lora")) == {"a": 4}
    assert made.matched(Prompt(tokens(1, 2, 3, 4), b"lora+salt")) == {"a": 2}
    assert made.matched(Prompt(tokens(1, 2, 3, 4))) == {}


def test_engines_with_other_block_sizes_are_matched_too() -> None:
    """Each in its own; a block that is filled in part is not counted."""
    made = index(stored([1, 2], [1, 2, 3, 4]), stored([3], [5], parent=2, size=1))
    made.apply("b", 0, stored([1], [1, 2, 3, 4, 5], size=5))
    assert made.matched(Prompt(tokens(1, 2, 3, 4, 5))) == {"a": 4, "b": 5}


def test_ranks_are_apart_and_the_best_one_counts() -> None:
    """A rank that clears its cache does not clear its neighbour's."""
    made = index(stored([1], [1, 2]))
    made.apply("a", 1, stored([1, 2], [1, 2, 3, 4]))
    assert made.matched(Prompt(tokens(1, 2, 3, 4))) == {"a": 4}
    assert made.held("a") == 3
    made.apply("a", 1, Cleared())
    assert made.matched(Prompt(tokens(1, 2, 3, 4))) == {"a": 2}
    made.forget("a", 0)
    made.forget("a", 0)
    assert (len(made), made.matched(Prompt(tokens(1, 2)))) == (0, {})


def test_a_name_that_is_given_to_another_block_stands_for_that_one() -> None:
    """The old block is gone, although nobody said so."""
    made = index(stored([1], [1, 2]), stored([1], [8, 9]))
    assert made.matched(Prompt(tokens(1, 2))) == {}
    assert made.matched(Prompt(tokens(8, 9))) == {"a": 2}
    assert len(made) == 1


def test_the_index_is_bounded() -> None:
    """What does not fit is counted, and room that becomes free is used again."""
    made = index(stored([1, 2, 3], [1, 2, 3, 4, 5, 6]), limit=2)
    assert (len(made), made.left_out) == (2, 1)
    made.apply("a", 0, Removed(GPU, [2]))
    made.apply("b", 0, stored([7], [8, 9]))
    assert made.matched(Prompt(tokens(8, 9))) == {"b": 2}


class Engine:
    """A prefix cache that tells of everything: paths of blocks, each with so many copies."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, ...], int] = {}

    def store(self, path: tuple[int, ...], start: int) -> Stored | None:
        """Blocks of a prompt from block `start` on; one token per block. The blocks before have to be there."""
        if start >= len(path) or any(path[:i] not in self.copies for i in range(1, start + 1)):
            return None
        for end in range(start + 1, len(path) + 1):
            self.copies[path[:end]] = self.copies.get(path[:end], 0) + 1
        hashes = [repr(path[:end]).encode() for end in range(start + 1, len(path) + 1)]
        parent = repr(path[:start]).encode() if start else None
        return Stored(GPU, hashes, parent, tokens(*path[start:]), 1, [b""] * len(hashes))

    def evict(self, path: tuple[int, ...]) -> Removed | None:
        """One copy of a block."""
        if path not in self.copies:
            return None
        self.copies[path] -= 1
        if not self.copies[path]:
            del self.copies[path]
        return Removed(GPU, [repr(path).encode()])

    def depth(self, prompt: tuple[int, ...]) -> int:
        """Tokens from the prompt's beginning that are in the cache."""
        return next((i for i in range(len(prompt)) if prompt[: i + 1] not in self.copies), len(prompt))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1), st.sampled_from("sssec"), paths, st.integers(0, 4)),
    max_size=60,
)


@given(steps=steps, prompts=st.lists(paths, min_size=1, max_size=5))
def test_any_stream_of_events_gives_what_the_engines_hold(
    steps: list[tuple[str, int, str, tuple[int, ...], int]], prompts: list[tuple[int, ...]]
) -> None:
    """Two engines with two ranks each; their caches and the index never differ, nor does its count of blocks."""
    engines = {(name, rank): Engine() for name in "ab" for rank in (0, 1)}
    made = KvIndex(10_000)
    for name, rank, what, path, start in steps:
        engine = engines[name, rank]
        if what == "c":
            engine.copies.clear()
            made.apply(name, rank, Cleared())
            continue
        event = engine.store(path, start) if what == "s" else engine.evict(path)
        if event is not None:
            made.apply(name, rank, event)
        assert len(made) == sum(len(e.copies) for e in engines.values())
    for prompt in prompts:
        depths = {n: max(engines[n, 0].depth(prompt), engines[n, 1].depth(prompt)) for n in "ab"}
        assert made.matched(Prompt(tokens(*prompt))) == {n: d for n, d in depths.items() if d}
