"""The KV pool: references, reuse, masked reads, prefix cache, leases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.engines.emulated.blocks import BlockPool, Leases, prefix_keys
from disagg.engines.emulated.model import ToyModel

MODEL = ToyModel.named("m")


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50), st.integers(1, 9), st.data())
def test_a_masked_read_gives_the_sum_of_what_was_written(tokens: list[int], size: int, data: st.DataObject) -> None:
    """Whatever the cuts in which KV is written, every prefix reads as if computed in one piece."""
    pool = BlockPool(64, size)
    blocks = pool.allocate(-(-len(tokens) // size))
    assert blocks is not None
    sums = MODEL.extend(0, tokens)
    at = 0
    while at < len(tokens):
        count = data.draw(st.integers(1, len(tokens) - at))
        before = pool.context(blocks, at)
        pool.write(blocks, at, before, MODEL.extend(before, tokens[at : at + count]))
        at += count
    assert [pool.context(blocks, n) for n in range(1, len(tokens) + 1)] == sums


def test_a_raw_copy_reads_the_same_in_another_pool() -> None:
    """What a decode engine pulls is what prefill computed."""
    source, target = BlockPool(8, 4), BlockPool(8, 4)
    tokens = list(range(10))
    theirs, ours = source.allocate(3), target.allocate(5)
    assert theirs is not None
    assert ours is not None
    sums = MODEL.extend(0, tokens)
    source.write(theirs, 0, 0, sums)
    target.write_raw(ours[2:], source.read_raw(theirs), 4)
    assert target.context(ours[2:], 9) == sums[8]


def test_content_outlives_its_owner_until_it_is_overwritten() -> None:
    """A late reader finds the old content first and foreign content after reuse; neither is an error."""
    pool = BlockPool(1, 4)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.write(blocks, 0, 0, MODEL.extend(0, [1, 2, 3, 4]))
    old = pool.read_raw(blocks)
    pool.release(blocks)
    assert pool.read_raw(blocks) == old
    again = pool.allocate(1)
    assert again == blocks
    pool.write(blocks, 0, 0, MODEL.extend(0, [9, 9, 9, 9]))
    assert pool.read_raw(blocks) != old


def test_a_block_id_outside_the_pool_is_refused() -> None:
    """A handle with impossible ids fails instead of reading from somewhere."""
    with pytest.raises(IndexError, match="0 to 7"):
        BlockPool(8, 4).read_raw([8])


def test_cached_blocks_are_found_in_order_and_forgotten_when_reused() -> None:
    """The prefix cache gives the longest known beginning, and never a block that holds something else by now."""
    pool = BlockPool(3, 2)
    keys = prefix_keys([1, 2, 3, 4, 5], 2)
    assert len(keys) == 2
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        pool.remember(block, key)
    pool.release(blocks)
    assert pool.find(keys) == blocks
    assert pool.find(prefix_keys([1, 2, 9, 9], 2)) == blocks[:1]
    assert pool.find(prefix_keys([1, 2, 3, 4], 2, "salt")) == []
    pool.allocate(3)
    assert pool.find(keys) == []


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share and release in any order; no block is lost, shared with the free list, or owned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.pool.free_blocks
        taken = self.pool.allocate(count)
        if count > free:
            assert taken is None
        else:
            assert taken is not None
            assert not {b for owner in self.owners for b in owner} & set(taken)
            self.owners.append(taken)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.owners)))
        self.pool.share(blocks)
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(index))

    @invariant()
    def nothing_is_lost(self) -> None:
        owned = {block for owner in self.owners for block in owner}
        assert self.pool.free_blocks == 7 - len(owned)
        assert self.pool.usage == pytest.approx(len(owned) / 7)


TestPoolMachine = PoolMachine.TestCase


def test_a_lease_ends_when_it_was_not_renewed_and_does_not_hide_behind_one_that_was() -> None:
    """The reaper looks at every lease: a long-lived first entry does not keep later ones alive."""
    leases = Leases(30.0)
    leases.pin("renewed", [1], now=0.0)
    leases.pin("abandoned", [2, 3], now=1.0)
    leases.pin("abandoned too", [4], now=1.0)
    leases.renew("renewed", now=20.0)
    leases.renew("unknown", now=20.0)
    assert leases.reap(30.0) == []
    assert leases.reap(31.0) == [2, 3, 4]
    assert leases.expired == 2
    assert leases.reap(39.9) == []
    assert leases.reap(40.0) == [1]
    assert len(leases) == 0


def test_a_renewal_never_shortens_a_lease() -> None:
    """A heartbeat right after prefill leaves the full lease in place."""
    leases = Leases(30.0)
    leases.pin("r", [1], now=0.0)
    leases.renew("r", now=0.5)
    assert leases.reap(29.9) == []
    assert leases.reap(30.0) == [1]


def test_a_notice_after_the_end_is_counted() -> None:
    """The only trace of a stale read on the owner's side."""
    leases = Leases(30.0)
    leases.pin("r", [4], now=0.0)
    assert leases.collect("r") == [4]
    assert leases.late == 0
    assert leases.collect("r") == []
    assert leases.late == 1
