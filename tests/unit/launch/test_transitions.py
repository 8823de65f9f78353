"""`disagg.launch.transitions`: an instance's life under any order of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.launch.instance import (
    ALIVE,
    Abort,
    Action,
    Answered,
    Cleaned,
    Died,
    Event,
    HandoffFailed,
    HandoffWorked,
    Kill,
    Limits,
    ProbeBegan,
    Record,
    Silent,
    Spawn,
    Spawned,
    Start,
    State,
    StopRequested,
    Terminate,
    Tick,
)
from disagg.launch.transitions import decide

LIMITS = Limits()


@dataclass
class Life:
    """A record driven through events, with the incarnation counted up as the supervisor does."""

    record: Record
    now: float = 0.0
    incarnations: int = 0

    def feed(self, event: Event, after_s: float = 0.0) -> tuple[Action, ...]:
        self.now += after_s
        self.record, actions = decide(self.record, event, self.now, LIMITS)
        if Spawn() in actions:
            self.incarnations += 1
            self.record, further = decide(self.record, Spawned(self.id), self.now, LIMITS)
            assert further == ()
        return actions

    @property
    def id(self) -> str:
        return str(self.incarnations)

    def state(self) -> State:
        return self.record.state


def starting() -> Life:
    life = Life(Record())
    assert life.feed(Start()) == (Spawn(),)
    return life


def ready() -> Life:
    life = starting()
    life.feed(Answered(life.id), 5)
    life.feed(ProbeBegan(life.id))
    assert life.state() is State.VERIFYING
    life.feed(HandoffWorked(life.id))
    assert life.state() is State.READY
    return life


def restarted(life: Life) -> None:
    life.feed(Died(life.id, "crash"))
    life.feed(Cleaned(life.id))
    life.feed(Tick(), LIMITS.backoff_max_s)
    assert life.state() is State.STARTING


def test_health_alone_is_not_ready() -> None:
    """An instance that answers waits for a handoff that works, however often it answers."""
    life = starting()
    for _ in range(10):
        life.feed(Answered(life.id), 2)
    assert life.state() is State.HEALTHY


def test_a_death_before_ready_ends_the_launch_with_its_cause() -> None:
    """A first start that fails is not repeated: the user's configuration is wrong."""
    life = starting()
    assert life.feed(Died(life.id, "exited with code 1")) == (Abort("exited with code 1"),)
    assert life.state() is State.FAILED


def test_a_start_that_takes_too_long_ends_the_launch() -> None:
    """The process is killed and the launch says after how many seconds."""
    life = starting()
    assert life.feed(Tick(), LIMITS.start_timeout_s - 1) == ()
    kill, abort = life.feed(Tick(), 1)
    assert kill == Kill()
    assert isinstance(abort, Abort)
    assert "600 s" in abort.reason


def test_a_slow_restart_is_restarted_and_not_fatal() -> None:
    """What has been ready once is worth another try."""
    life = ready()
    restarted(life)
    assert life.feed(Tick(), LIMITS.start_timeout_s) == (Terminate(),)
    life.feed(Died(life.id, "terminated"))
    life.feed(Cleaned(life.id))
    assert life.state() is State.BACKOFF


def test_a_crash_restarts_under_a_new_incarnation_after_the_ports_are_free() -> None:
    """No second start while anything of the first is left."""
    life = ready()
    assert life.feed(Died("1", "was killed by SIGSEGV")) == ()
    assert life.state() is State.BACKOFF
    assert life.record.detail == "was killed by SIGSEGV"
    assert life.feed(Tick(), 100) == ()
    life.feed(Cleaned("1"))
    assert life.feed(Tick(), 0.5) == ()
    assert life.feed(Tick(), 0.5) == (Spawn(),)
    assert life.record.incarnation == "2"


def test_pauses_between_restarts_double_up_to_a_minute() -> None:
    """Crashes in a row are answered more and more slowly."""
    life = ready()
    pauses = []
    for _ in range(8):
        life.feed(Died(life.id, "crash"))
        life.feed(Cleaned(life.id))
        assert life.record.due is not None
        pauses.append(life.record.due - life.now)
        life.feed(Tick(), pauses[-1])
        life.feed(Answered(life.id))
        life.feed(HandoffWorked(life.id))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_five_good_minutes_forget_earlier_crashes() -> None:
    """A crash a day does not add up to a minute's pause."""
    life = ready()
    for _ in range(3):
        restarted(life)
        life.feed(Answered(life.id))
        life.feed(HandoffWorked(life.id))
    life.feed(Tick(), LIMITS.backoff_reset_s)
    life.feed(Died(life.id, "crash"))
    life.feed(Cleaned(life.id))
    assert life.record.due == life.now + LIMITS.backoff_first_s


def test_a_crash_while_a_restart_starts_is_not_fatal() -> None:
    """Only the very first start may end the launch."""
    life = ready()
    restarted(life)
    assert life.feed(Died(life.id, "crash")) == ()
    assert life.state() is State.BACKOFF


def test_silence_takes_traffic_away_and_an_answer_gives_it_back() -> None:
    """Busy is not dead: the same incarnation goes on without a restart or a new proof."""
    life = ready()
    life.feed(Silent("1", "no answer"), 2)
    life.feed(Silent("1", "no answer"), 2)
    assert life.state() is State.READY
    life.feed(Silent("1", "no answer"), 2)
    assert life.state() is State.SUSPECT
    life.feed(Answered("1"), 60)
    assert life.state() is State.READY


def test_answers_in_between_keep_an_instance_in_traffic() -> None:
    """A lost check now and then is nothing."""
    life = ready()
    for _ in range(20):
        life.feed(Silent("1", "no answer"), 2)
        life.feed(Silent("1", "no answer"), 2)
        life.feed(Answered("1"), 2)
        assert life.state() is State.READY


def test_long_silence_restarts() -> None:
    """A frozen engine is ended and started again, though not before the limit."""
    life = ready()
    since = life.record.answered_at
    while life.now + 2 - since < LIMITS.silence_limit_s:
        assert life.feed(Silent("1", "no answer"), 2) == ()
    assert life.feed(Silent("1", "no answer"), 2) == (Terminate(),)
    assert life.state() is State.STOPPING
    life.feed(Died("1", "was killed by SIGKILL"))
    life.feed(Cleaned("1"))
    assert life.feed(Tick(), 1) == (Spawn(),)


def test_a_start_is_not_suspected_for_its_silence() -> None:
    """An engine that loads weights does not answer for minutes; the start limit alone bounds it."""
    life = starting()
    for _ in range(100):
        assert life.feed(Silent("1", "connection refused"), 2) == ()
    assert life.state() is State.STARTING


def test_failed_handoffs_end_a_launch_with_the_reason() -> None:
    """An engine that answers but hands nothing over is a wrong configuration, and says so."""
    life = starting()
    life.feed(Answered("1"), 5)
    for _ in range(LIMITS.handoff_attempts - 1):
        life.feed(ProbeBegan("1"))
        assert life.feed(HandoffFailed("1", "block sizes differ")) == ()
        assert life.state() is State.HEALTHY
        assert life.record.detail == "block sizes differ"
    kill, abort = life.feed(HandoffFailed("1", "block sizes differ"))
    assert kill == Kill()
    assert isinstance(abort, Abort)
    assert "block sizes differ" in abort.reason


def test_failed_handoffs_after_a_restart_keep_it_out_of_traffic() -> None:
    """Later, an instance without a working handoff stays out and is tried on."""
    life = ready()
    restarted(life)
    life.feed(Answered(life.id))
    for _ in range(50):
        assert life.feed(HandoffFailed(life.id, "no handle"), 5) == ()
        assert life.state() is State.HEALTHY


@pytest.mark.parametrize("make", [starting, ready])
def test_a_stop_ends_and_a_second_one_kills(make: Callable[[], Life]) -> None:
    """First SIGTERM, then SIGKILL; the death of a process that was asked to end is no crash."""
    life = make()
    assert life.feed(StopRequested()) == (Terminate(),)
    assert life.feed(StopRequested()) == (Kill(),)
    assert life.feed(Died("1", "terminated")) == ()
    life.feed(Cleaned("1"))
    assert life.state() is State.STOPPED
    assert life.feed(Tick(), 1000) == ()


def test_a_stop_during_a_restart_does_not_start_again() -> None:
    """A stop wins over a restart that is under way, in each of its phases."""
    waiting = ready()
    waiting.feed(Died("1", "crash"))
    during_cleaning = Life(waiting.record, waiting.now, 1)
    waiting.feed(Cleaned("1"))
    assert waiting.feed(StopRequested()) == ()
    assert waiting.state() is State.STOPPED
    assert during_cleaning.feed(StopRequested()) == ()
    assert during_cleaning.state() is State.STOPPING
    during_cleaning.feed(Cleaned("1"))
    assert during_cleaning.state() is State.STOPPED
    ending = ready()
    ending.feed(Silent("1", "no answer"), LIMITS.silence_limit_s)
    assert ending.feed(StopRequested()) == ()
    assert ending.feed(StopRequested()) == (Kill(),)
    ending.feed(Cleaned("1"))
    assert ending.state() is State.STOPPED


def test_reports_of_the_dead_do_not_touch_the_living() -> None:
    """A late report about an earlier incarnation changes nothing."""
    life = ready()
    restarted(life)
    before = life.record
    for late in (
        Answered("1"),
        HandoffWorked("1"),
        Died("1", "x"),
        Cleaned("1"),
        Silent("1", "x"),
    ):
        assert life.feed(late) == ()
        assert life.record == before


def events(known: int) -> st.SearchStrategy[Event]:
    ids = st.integers(0, known).map(str)
    return st.one_of(
        st.just(Tick()),
        st.just(StopRequested()),
        st.just(Start()),
        ids.map(Answered),
        ids.map(lambda i: Silent(i, "silent")),
        ids.map(ProbeBegan),
        ids.map(HandoffWorked),
        ids.map(lambda i: HandoffFailed(i, "failed")),
        ids.map(lambda i: Died(i, "died")),
        ids.map(Cleaned),
    )


@given(st.lists(st.tuples(events(4), st.floats(0, 700)), max_size=60))
def test_any_order_of_events_keeps_the_books(history: list[tuple[Event, float]]) -> None:
    """At most one incarnation exists at a time; traffic needs a proof of the same incarnation; stopped stays so."""
    life = Life(Record())
    proven: set[str] = set()
    unclean: set[str] = set()
    aborted = False
    for event, after_s in history:
        before = life.record
        actions = life.feed(event, after_s)
        if isinstance(event, HandoffWorked):
            proven.add(event.incarnation)
        if isinstance(event, Cleaned):
            unclean.discard(event.incarnation)
        if Spawn() in actions:
            assert not unclean, "started while something of an earlier start was left"
            unclean.add(life.id)
        if life.state() is State.READY:
            assert life.id in proven
        if life.state() in ALIVE:
            assert life.record.present
        assert not (aborted and life.state() in ALIVE), "went on after the launch was given up"
        aborted = aborted or any(isinstance(a, Abort) for a in actions)
        if before.state is State.STOPPED:
            assert life.state() is State.STOPPED
            assert actions == ()


@given(st.lists(st.tuples(events(4), st.floats(0, 700)), max_size=40))
def test_from_anywhere_a_stop_leads_to_the_end(history: list[tuple[Event, float]]) -> None:
    """Whatever happened, one stop and the reports of the process lead to stopped."""
    life = Life(Record())
    for event, after_s in history:
        life.feed(event, after_s)
    life.feed(StopRequested())
    life.feed(Died(life.id, "ended"))
    life.feed(Cleaned(life.id))
    assert life.state() is State.STOPPED
