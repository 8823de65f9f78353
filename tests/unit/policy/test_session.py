"""Sessions have homes, and keep them as far as they can."""

from __future__ import annotations

from collections import Counter

from disagg.policy.base import Facts, Snapshot, choose
from disagg.policy.session import ALWAYS_ROOM, SessionAffinity

SESSIONS = [f"session-{i}".encode() for i in range(1000)]


def home(session: bytes, fleet: list[Snapshot], turn: int = 0) -> str:
    chosen = choose(SessionAffinity(), fleet, Facts(turn, session=session))
    assert chosen is not None
    return chosen.name


def idle(*names: str) -> list[Snapshot]:
    return [Snapshot(name, True, 0) for name in names]


def test_a_session_stays_where_it_is_whatever_the_turn_and_the_order() -> None:
    """Neither other requests nor the order of the list decide."""
    fleet = idle("a", "b", "c", "d")
    for session in SESSIONS[:50]:
        homes = {home(session, fleet, turn) for turn in range(8)} | {home(session, fleet[::-1])}
        assert len(homes) == 1


def test_sessions_are_spread() -> None:
    """Each of four instances gets about a quarter: within a fifth of it, for a thousand sessions."""
    counts = Counter(home(s, idle("a", "b", "c", "d")) for s in SESSIONS)
    assert all(200 <= counts[name] <= 300 for name in "abcd"), counts


def test_only_the_sessions_of_an_instance_that_leaves_move() -> None:
    """And they do not all move to the same one."""
    before = {s: home(s, idle("a", "b", "c", "d")) for s in SESSIONS}
    fleet = idle("a", "b", "c", "d")
    fleet[1] = fleet[1]._replace(ready=False)
    moved: Counter[str] = Counter()
    for session, was in before.items():
        now = home(session, fleet)
        if was == "b":
            moved[now] += 1
        else:
            assert now == was
    assert set(moved) == {"a", "c", "d"}


def test_an_instance_that_comes_takes_its_share_and_nothing_else_moves() -> None:
    """A fifth of the sessions, from each of the others."""
    before = {s: home(s, idle("a", "b", "c", "d")) for s in SESSIONS}
    after = {s: home(s, idle("a", "b", "c", "d", "e")) for s in SESSIONS}
    moved = [s for s in SESSIONS if after[s] != before[s]]
    assert {after[s] for s in moved} == {"e"}
    assert {before[s] for s in moved} == set("abcd")
    assert 150 <= len(moved) <= 250


def test_an_overloaded_home_loses_its_sessions_to_their_next_choice() -> None:
    """The hot instance is passed over by its own sessions; nobody else's move."""
    fleet = idle("a", "b", "c", "d")
    for session in SESSIONS[:100]:
        at_home = home(session, fleet)
        hot = [s._replace(in_flight=100 if s.name == at_home else 1) for s in fleet]
        rest = [s for s in fleet if s.name != at_home]
        assert home(session, hot) == home(session, rest)


def test_a_few_requests_are_no_overload() -> None:
    """Parallel requests of one session stay together when there is little to do."""
    fleet = idle("a", "b")
    at_home = home(b"s", fleet)
    busy = [s._replace(in_flight=ALWAYS_ROOM - 1 if s.name == at_home else 0) for s in fleet]
    assert home(b"s", busy) == at_home


def test_without_a_session_the_load_decides() -> None:
    """A request that names none is not hashed to the home of all that name none."""
    fleet = [Snapshot("a", True, 3), Snapshot("b", True, 1), Snapshot("c", True, 2)]
    assert home(b"", fleet) == "b"
