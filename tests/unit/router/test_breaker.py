"""Which end of a handover is at fault: over many requests the guilty engine is found, and no other one suffers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.policy.breaker import BreakerRules
from disagg.router.breaker import Breakers
from disagg.router.fleet import Fleet, Member, State
from disagg.router.metrics import Metrics
from disagg.topology.spec import Stage

RULES = BreakerRules(failures=3, open_s=5.0, max_open_s=60.0)


class World:
    """Pairs drawn at random among engines that are not held; `bad` fails every handover that it takes part in."""

    def __init__(self, prefills: int, decodes: int, bad: str, seed: int) -> None:
        self.fleet = Fleet((Stage.PREFILL, Stage.DECODE))
        self.now = 0.0
        self.breakers = Breakers(RULES, self.fleet, Metrics(self.fleet, lambda: self.now))
        self.random = random.Random(seed)
        self.bad = bad
        for stage, count in ((Stage.PREFILL, prefills), (Stage.DECODE, decodes)):
            for i in range(count):
                name = f"{stage}-{i}"
                self.fleet.add(name, stage, "http://127.0.0.1:1", "inc")
                self.fleet.mark(name, "inc", State.READY)

    def pick(self, stage: Stage) -> Member:
        self.breakers.look(self.now)
        members = self.fleet.members(stage)
        return self.random.choice([m for m in members if not m.held] or members)

    def request(self) -> bool:
        """One handover; whether it worked."""
        self.now += 0.1
        prefill, decode = self.pick(Stage.PREFILL), self.pick(Stage.DECODE)
        trials = [m for m in (prefill, decode) if self.breakers.began(m, self.now)]
        works = self.bad not in {prefill.name, decode.name}
        if works:
            self.breakers.succeeded(decode, self.now)
            self.breakers.succeeded(prefill, self.now)
        else:
            self.breakers.failed(decode, self.now, self.now, prefill)
        for member in trials:
            self.breakers.trial_over(member, self.now, verdict_follows=False)
        return works

    def held(self) -> set[str]:
        self.breakers.look(self.now)
        return {m.name for m in self.fleet.members() if m.held}


@settings(max_examples=60, deadline=None)
@given(
    prefills=st.integers(2, 6),
    decodes=st.integers(2, 6),
    stage=st.sampled_from([Stage.PREFILL, Stage.DECODE]),
    seed=st.integers(0, 10_000),
)
def test_the_bad_engine_is_found_and_hardly_any_request_is_lost(
    prefills: int, decodes: int, stage: Stage, seed: int
) -> None:
    """Whichever end it is on, in any shape with a choice: in the long run only trials fail, nobody else is out."""
    world = World(prefills, decodes, f"{stage}-1", seed)
    for _ in range(600):
        world.request()
    results = [world.request() for _ in range(600)]
    assert results.count(False) <= 6
    assert world.held() <= {f"{stage}-1"}


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.DECODE])
def test_it_has_its_share_again_when_it_works(stage: Stage) -> None:
    """One good trial is enough."""
    world = World(3, 3, f"{stage}-1", 1)
    for _ in range(300):
        world.request()
    world.bad = ""
    world.now += RULES.max_open_s
    results = [world.request() for _ in range(50)]
    assert all(results)
    assert world.held() == set()


def test_an_engine_that_leaves_is_forgotten() -> None:
    """A removed or replaced one is not looked at any more, and its late failures count for nobody."""
    world = World(2, 2, "decode-1", 1)
    for _ in range(100):
        world.request()
    assert world.breakers.any_tripped
    old = world.fleet.get("decode-1")
    assert old is not None
    world.fleet.update("decode-1", "second")
    assert not world.breakers.any_tripped
    other = world.fleet.get("prefill-0")
    assert other is not None
    world.fleet.remove("prefill-0")
    for _ in range(10):
        world.breakers.failed(other, world.now, world.now)
    assert not world.breakers.any_tripped


def fail(world: World, prefill: str, decode: str, times: int) -> None:
    p, d = world.fleet.get(prefill), world.fleet.get(decode)
    assert p is not None
    assert d is not None
    for _ in range(times):
        world.now += 0.1
        world.breakers.failed(d, world.now, world.now, p)


def test_partners_of_a_guilty_engine_are_forgiven() -> None:
    """Two failures with an engine that is out by now do not weigh on the next one with another."""
    world = World(2, 2, "", 0)
    fail(world, "prefill-0", "decode-0", 2)
    fail(world, "prefill-1", "decode-0", 1)
    assert world.held() == {"decode-0"}
    fail(world, "prefill-0", "decode-1", 2)
    assert world.held() == {"decode-0"}


def test_an_engine_that_was_blamed_for_another_one_is_let_go() -> None:
    """Decode was out after failures with one prefill only; that prefill then fails with the next decode too."""
    world = World(2, 2, "", 0)
    fail(world, "prefill-0", "decode-0", 3)
    assert world.held() == {"decode-0"}
    fail(world, "prefill-0", "decode-1", 3)
    assert world.held() == {"prefill-0"}


def test_failures_with_an_engine_that_is_out_are_that_ones() -> None:
    """A burst of late failures does not take its partners along."""
    world = World(2, 2, "", 0)
    fail(world, "prefill-0", "decode-0", 1)
    fail(world, "prefill-1", "decode-0", 2)
    for _ in range(20):
        fail(world, "prefill-0", "decode-0", 1)
        assert world.held() == {"decode-0"}
