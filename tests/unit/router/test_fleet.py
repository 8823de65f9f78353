"""Members, incarnations and states: the past of an instance never touches its present."""

from __future__ import annotations

import pytest

from disagg.engines.base import Peer
from disagg.router.fleet import Fleet, Member, State
from disagg.topology.spec import Stage

URL = "http://127.0.0.1:9900"


def fleet() -> tuple[Fleet, list[Member]]:
    made = Fleet((Stage.PREFILL, Stage.DECODE))
    gone: list[Member] = []
    made.on_gone(gone.append)
    made.add("prefill-0", Stage.PREFILL, URL, "one")
    return made, gone


def test_a_new_instance_gets_no_requests_until_it_is_ready() -> None:
    """Started is not ready."""
    f, _ = fleet()
    assert f.snapshots(Stage.PREFILL)[0].ready is False
    assert f.missing_stages() == (Stage.PREFILL, Stage.DECODE)
    assert f.mark("prefill-0", "one", State.READY)
    assert f.snapshots(Stage.PREFILL)[0].ready is True
    assert f.missing_stages() == (Stage.DECODE,)


def test_books_of_a_dead_incarnation_do_not_burden_the_new_one() -> None:
    """A leg that closes late counts down where it counted up."""
    f, gone = fleet()
    old = f.members()[0]
    old.count(1)
    new = f.update("prefill-0", "two")
    assert (new.in_flight, gone, old.state) == (0, [old], State.DOWN)
    old.count(-1)
    assert (old.in_flight, new.in_flight) == (0, 0)
    assert f.get("prefill-0") is new
    assert not f.is_current(old)
    assert f.is_current(new)


def test_news_about_a_replaced_process_is_ignored() -> None:
    """The old process' death notice may come after its successor's start."""
    f, gone = fleet()
    f.update("prefill-0", "two")
    f.mark("prefill-0", "two", State.READY)
    assert f.mark("prefill-0", "one", State.DOWN) is False
    assert f.snapshots(Stage.PREFILL)[0].ready
    assert len(gone) == 1
    assert f.mark("nobody", "one", State.READY) is False


def test_down_is_told_once_and_draining_keeps_what_it_has() -> None:
    """Listeners end requests of a dead process; a draining one is alive."""
    f, gone = fleet()
    f.mark("prefill-0", "one", State.DRAINING)
    assert gone == []
    assert f.is_current(f.members()[0])
    f.mark("prefill-0", "one", State.DOWN)
    f.mark("prefill-0", "one", State.DOWN)
    assert len(gone) == 1


def test_an_update_of_the_same_incarnation_only_adds_what_was_not_known() -> None:
    """The engine's own id is learnt after the start; requests under way go on."""
    f, gone = fleet()
    member = f.members()[0]
    assert f.update("prefill-0", "one", peer=Peer("e")) is member
    assert (member.peer.engine_id, gone) == ("e", [])


def test_order_is_kept_over_restarts_and_removal_is_told() -> None:
    """Policies rely on an order that does not change."""
    f, gone = fleet()
    f.add("prefill-1", Stage.PREFILL, "http://127.0.0.1:9901", "x")
    f.update("prefill-0", "two")
    assert [m.name for m in f.members(Stage.PREFILL)] == ["prefill-0", "prefill-1"]
    assert [s.name for s in f.snapshots(Stage.PREFILL)] == ["prefill-0", "prefill-1"]
    f.remove("prefill-0")
    assert [m.name for m in f.members()] == ["prefill-1"]
    assert [m.incarnation for m in gone] == ["one", "two"]


def test_a_name_is_used_once() -> None:
    """A second add would hide the first."""
    f, _ = fleet()
    with pytest.raises(ValueError, match="prefill-0"):
        f.add("prefill-0", Stage.PREFILL, URL, "two")
    with pytest.raises(ValueError, match="http"):
        f.add("prefill-1", Stage.PREFILL, "ftp://x", "two")


def test_snapshots_are_values() -> None:
    """What a policy was given does not change under it."""
    f, _ = fleet()
    before = f.snapshots(Stage.PREFILL)
    f.members()[0].count(1)
    assert before[0].in_flight == 0
    assert f.snapshots(Stage.PREFILL)[0].in_flight == 1
