"""`disagg.serve.fleet_link`: processes decide what the router gives to instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.engines.base import Peer
from disagg.launch.instance import State as Life
from disagg.launch.member import View
from disagg.router.fleet import Fleet, Member, State
from disagg.serve.fleet_link import FleetLink
from disagg.topology.instances import Instance
from disagg.topology.spec import Stage

INSTANCE = Instance("decode-0", Stage.DECODE, 0, (), "127.0.0.1", 9800, 5600)


def view(state: Life, incarnation: str = "one", name: str = "decode-0") -> View:
    return View(name, state, incarnation, "", 0.0, 1, None, Path("log"), 0)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet((Stage.DECODE,))


@pytest.fixture
def link(fleet: Fleet) -> FleetLink:
    return FleetLink(fleet, [INSTANCE], lambda _instance, incarnation: Peer(incarnation))


def state(fleet: Fleet) -> State:
    member = fleet.get("decode-0")
    assert member is not None
    return member.state


def test_only_ready_gets_new_requests(fleet: Fleet, link: FleetLink) -> None:
    """Every other state of a process is something else for the router."""
    link.on_state(view(Life.STARTING))
    for life in Life:
        link.on_state(view(life))
        assert (state(fleet) is State.READY) is (life is Life.READY)


def test_an_instance_that_does_not_answer_keeps_what_it_has(fleet: Fleet, link: FleetLink) -> None:
    """Busy is not dead: its open requests go on."""
    gone: list[Member] = []
    fleet.on_gone(gone.append)
    link.on_state(view(Life.STARTING))
    gone.clear()
    link.on_state(view(Life.READY))
    link.on_state(view(Life.SUSPECT))
    assert state(fleet) is State.DRAINING
    assert gone == []


def test_a_restart_is_a_new_member(fleet: Fleet, link: FleetLink) -> None:
    """The old incarnation is gone at the crash, and its late news does not touch the new one."""
    link.on_state(view(Life.STARTING))
    link.on_state(view(Life.READY))
    old = fleet.get("decode-0")
    link.on_state(view(Life.BACKOFF))
    link.on_state(view(Life.STARTING, "two"))
    new = fleet.get("decode-0")
    assert old is not None
    assert new is not None
    assert new is not old
    assert old.state is State.DOWN
    assert (new.incarnation, new.peer.engine_id) == ("two", "two")
    link.on_state(view(Life.READY, "two"))
    link.on_state(view(Life.STOPPED, "one"))
    assert state(fleet) is State.READY


def test_services_are_not_instances(fleet: Fleet, link: FleetLink) -> None:
    """A KV store's process is not routed to."""
    link.on_state(view(Life.READY, name="store"))
    assert [m.name for m in fleet.members()] == ["decode-0"]
