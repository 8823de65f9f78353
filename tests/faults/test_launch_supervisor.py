"""`disagg.launch.supervisor` over real processes: starts, crashes, silence, stops."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.errors import DisaggError, InstanceDiedError, LaunchError
from disagg.http.client import Client
from disagg.launch import procfs
from disagg.launch.health import Rhythm
from disagg.launch.instance import Limits, State
from disagg.launch.logs import open_run_folder
from disagg.launch.member import Member, Proof
from disagg.launch.ports import taken_ports
from disagg.launch.process import sweep
from disagg.launch.supervisor import Settings, Supervisor
from tests.support.launch_fakes import PLAN, Listener, changing_member, fake_member, segment_exists, until

LIMITS = Limits(start_timeout_s=20, backoff_first_s=0.1, silence_limit_s=1.5, suspect_after=2)
RHYTHM = Rhythm(ready_s=0.1, waiting_s=0.05, timeout_s=0.5)


class Launch:
    """A supervisor under test."""

    def __init__(self, folder: Path, members: Sequence[Member], limits: Limits = LIMITS, grace_s: float = 5) -> None:
        self.client = Client()
        self.listener = Listener()
        self.members = members
        settings = Settings(open_run_folder(str(folder / "logs")), limits, RHYTHM, grace_s, PLAN)
        self.supervisor = Supervisor(members, settings, self.client, [self.listener])

    def tree(self) -> list[int]:
        return list(procfs.marked(procfs.RUN_MARK, self.supervisor.run_id))

    def pid(self, name: str) -> int:
        pid = next(v.pid for v in self.supervisor.views() if v.name == name)
        assert pid is not None
        return pid

    def incarnation(self, name: str) -> str:
        return next(v.incarnation for v in self.supervisor.views() if v.name == name)

    def state(self, name: str) -> State:
        return self.supervisor.record(name).state

    async def close(self) -> None:
        self.supervisor.hurry()
        await self.supervisor.stop()
        await self.client.close()
        await sweep(procfs.RUN_MARK, self.supervisor.run_id)


Make = Callable[..., Launch]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Launch] = []

    def make(members: Sequence[Member], limits: Limits = LIMITS, grace_s: float = 5) -> Launch:
        made.append(Launch(tmp_path, members, limits, grace_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()
        assert one.tree() == []


def pair(kv: Path, *options: str) -> list[Member]:
    return [
        fake_member("prefill-0", Proof.SENDS, kv, *options),
        fake_member("decode-0", Proof.RECEIVES, kv, *options),
    ]


def ports(members: Sequence[Member]) -> list[int]:
    return [port for member in members for port in member.ports.values()]


async def test_a_pair_is_ready_after_a_handoff_and_leaves_nothing_after_a_stop(launch: Make, tmp_path: Path) -> None:
    """Each state is passed through, and processes, ports and segments are gone at the end."""
    shm = f"disagg-test-{uuid.uuid4().hex[:12]}"
    members = [
        fake_member("prefill-0", Proof.SENDS, tmp_path, "--children", "1", "--shm", shm),
        fake_member("decode-0", Proof.RECEIVES, tmp_path, "--children", "1"),
    ]
    run = launch(members)
    await run.supervisor.start()
    for name in ("prefill-0", "decode-0"):
        states = run.listener.states(name)
        assert list(dict.fromkeys(states)) == ["starting", "healthy", "verifying", "ready"]
    assert segment_exists(shm)
    await run.supervisor.stop([["prefill-0"], ["decode-0"]])
    assert run.tree() == []
    assert taken_ports(ports(members)) == {}
    assert not segment_exists(shm)
    order = [(v.name, v.state.value) for v in run.listener.heard]
    assert order.index(("prefill-0", "stopped")) < order.index(("decode-0", "stopping"))
    assert order[-1] == ("decode-0", "stopped")


async def test_an_engine_that_dies_at_start_ends_the_launch_with_its_cause(launch: Make, tmp_path: Path) -> None:
    """The message has the exit code, the exception out of the log, the log's last lines and its path."""
    members = [
        fake_member("prefill-0", Proof.SENDS, tmp_path, "--die", "ValueError: head size 16 is not supported"),
        fake_member("decode-0", Proof.RECEIVES, tmp_path),
    ]
    run = launch(members)
    with pytest.raises(InstanceDiedError) as caught:
        await run.supervisor.start()
    text = str(caught.value)
    assert "prefill-0 exited with code 3: ValueError: head size 16 is not supported" in text
    assert "fake engine starts" in text
    assert str(tmp_path / "logs" / "prefill-0.log") in text


async def test_a_command_that_does_not_exist_ends_the_launch(launch: Make, tmp_path: Path) -> None:
    """A wrong executable is named."""
    member = changing_member("prefill-0", Proof.NOTHING, tmp_path, lambda _: ())
    plan = member.plan

    def broken(incarnation: str, run_dir: str):  # type: ignore[no-untyped-def]
        planned = plan(incarnation, run_dir)
        return type(planned)(planned.name, ("/no/such/engine",), planned.env, ports=planned.ports)

    run = launch([Member(member.name, member.proof, broken, member.origin, ports=member.ports)])
    with pytest.raises(InstanceDiedError, match="/no/such/engine"):
        await run.supervisor.start()


async def test_a_missing_package_points_to_the_doctor(launch: Make, tmp_path: Path) -> None:
    """The commonest first failure says what to do next."""
    member = changing_member("prefill-0", Proof.NOTHING, tmp_path, lambda _: ())
    plan = member.plan

    def without_engine(incarnation: str, run_dir: str):  # type: ignore[no-untyped-def]
        planned = plan(incarnation, run_dir)
        argv = (sys.executable, "-m", "no_such_engine_package.server")
        return type(planned)(planned.name, argv, planned.env, ports=planned.ports)

    run = launch([Member(member.name, member.proof, without_engine, member.origin, ports=member.ports)])
    with pytest.raises(InstanceDiedError, match="`disagg doctor` says which"):
        await run.supervisor.start()


async def test_an_engine_that_never_answers_ends_the_launch_with_its_log(launch: Make, tmp_path: Path) -> None:
    """The start limit names the limit and shows what the engine last said."""
    limits = Limits(start_timeout_s=3)
    run = launch([fake_member("prefill-0", Proof.NOTHING, tmp_path, "--hang-at-start")], limits)
    with pytest.raises(LaunchError, match=r"within 3 s") as caught:
        await run.supervisor.start()
    assert "fake engine starts" in str(caught.value)


async def test_an_engine_whose_log_says_that_it_will_never_answer_ends_the_launch_at_once(
    launch: Make, tmp_path: Path
) -> None:
    """vLLM goes on waiting after its handshake listener could not bind; nobody has to wait for the start limit."""
    line = "Exception in thread nixl_handshake_listener:"
    member = fake_member("prefill-0", Proof.NOTHING, tmp_path, "--say", line, "--hang-at-start")
    pattern = re.compile("Exception in thread nixl_handshake_listener")
    run = launch([replace(member, never_ready=pattern)], Limits(start_timeout_s=600))
    with pytest.raises(LaunchError, match="will never be ready, although it runs") as caught:
        async with asyncio.timeout(60):
            await run.supervisor.start()
    assert line in str(caught.value)


async def test_an_engine_that_takes_no_kv_over_is_never_ready(launch: Make, tmp_path: Path) -> None:
    """Decode answers with status 200, but its counter does not rise: reported with the reason."""
    members = [
        fake_member("prefill-0", Proof.SENDS, tmp_path),
        fake_member("decode-0", Proof.RECEIVES, tmp_path, "--no-connector"),
    ]
    run = launch(members, Limits(handoff_attempts=1))
    with pytest.raises(DisaggError, match="computed the prompt itself"):
        await run.supervisor.start()
    assert "ready" not in run.listener.states("decode-0")


async def test_one_broken_instance_does_not_hide_the_working_ones(launch: Make, tmp_path: Path) -> None:
    """2P2D with one decode that takes nothing over: the other three become ready, and it is the one that is named."""
    members = [
        fake_member("prefill-0", Proof.SENDS, tmp_path),
        fake_member("prefill-1", Proof.SENDS, tmp_path),
        fake_member("decode-0", Proof.RECEIVES, tmp_path, "--no-connector"),
        fake_member("decode-1", Proof.RECEIVES, tmp_path),
    ]
    run = launch(members, Limits(handoff_attempts=2))
    with pytest.raises(LaunchError, match="decode-0 answers its health check, but no KV handoff"):
        await run.supervisor.start()
    assert {n for n in ("prefill-0", "prefill-1", "decode-1") if run.state(n) is State.READY} == {
        "prefill-0",
        "prefill-1",
        "decode-1",
    }


async def test_every_pair_of_a_small_fleet_is_warmed(launch: Make, tmp_path: Path) -> None:
    """In 2P2D each decode instance has taken KV from each prefill instance before long."""
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    members = [
        fake_member(n, Proof.SENDS if n.startswith("prefill") else Proof.RECEIVES, tmp_path, "--answers")
        for n in names
    ]
    run = launch(members)
    await run.supervisor.start()
    logs = [tmp_path / "logs" / f"{n}.log" for n in names]
    await until(lambda: all(log.read_text().count("answered") == 2 for log in logs))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_killed_instance_comes_back_under_a_new_incarnation(launch: Make, tmp_path: Path, name: str) -> None:
    """It is out of traffic at once, restarted on the same port, and verified again before it is ready."""
    run = launch(pair(tmp_path, "--children", "1"))
    await run.supervisor.start()
    old = run.incarnation(name)
    before = len(run.listener.heard)
    os.kill(run.pid(name), signal.SIGKILL)
    await until(lambda: run.state(name) is State.BACKOFF)
    await until(lambda: run.state(name) is State.READY)
    new = run.incarnation(name)
    assert new != old
    assert procfs.marked(procfs.INCARNATION_MARK, old) == ()
    later = [v.state.value for v in run.listener.heard[before:] if v.name == name]
    assert list(dict.fromkeys(later)) == ["backoff", "starting", "healthy", "verifying", "ready"]
    assert "killed by SIGKILL" in next(v.detail for v in run.listener.heard[before:] if v.name == name)


async def test_restarts_go_on_while_the_engine_keeps_crashing(launch: Make, tmp_path: Path) -> None:
    """A crash at a restart is tried again; only a first start may end the launch."""

    def options(start: int) -> tuple[str, ...]:
        return ("--die", "RuntimeError: device busy") if start in (1, 2) else ()

    run = launch([changing_member("prefill-0", Proof.NOTHING, tmp_path, options)])
    await run.supervisor.start()
    os.kill(run.pid("prefill-0"), signal.SIGKILL)
    await until(lambda: run.supervisor.record("prefill-0").starts == 4 and run.state("prefill-0") is State.READY)
    assert any("device busy" in v.detail for v in run.listener.heard)


async def test_a_killed_keeper_takes_its_engine_along_and_is_replaced(launch: Make, tmp_path: Path) -> None:
    """Engine, helpers and shared memory of a keeper that was killed are swept before the restart."""
    shm = f"disagg-test-{uuid.uuid4().hex[:12]}"
    seen: list[bool] = []

    def options(start: int) -> tuple[str, ...]:
        seen.append(segment_exists(shm))
        return ("--children", "1", "--shm", shm) if start == 0 else ()

    run = launch([changing_member("prefill-0", Proof.NOTHING, tmp_path, options)])
    await run.supervisor.start()
    old = run.incarnation("prefill-0")
    engine = run.pid("prefill-0")
    await asyncio.sleep(1.0)  # the keeper looks at /dev/shm every half second
    keeper = procfs.parent_of(engine)
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    await until(lambda: run.state("prefill-0") is State.READY and run.incarnation("prefill-0") != old)
    assert procfs.marked(procfs.INCARNATION_MARK, old) == ()
    assert not procfs.is_running(engine)
    assert seen == [False, False]
    assert not segment_exists(shm)


async def test_a_frozen_engine_loses_its_traffic_and_gets_it_back(launch: Make, tmp_path: Path) -> None:
    """SIGSTOP for less than the limit: suspect, then ready again as the same incarnation."""
    run = launch(pair(tmp_path), Limits(silence_limit_s=60, suspect_after=2))
    await run.supervisor.start()
    old = run.incarnation("decode-0")
    os.kill(run.pid("decode-0"), signal.SIGSTOP)
    await until(lambda: run.state("decode-0") is State.SUSPECT)
    os.kill(run.pid("decode-0"), signal.SIGCONT)
    await until(lambda: run.state("decode-0") is State.READY)
    assert run.incarnation("decode-0") == old


async def test_a_frozen_engine_is_restarted_in_the_end(launch: Make, tmp_path: Path) -> None:
    """Without an answer for the whole limit, the process is ended and started again."""
    run = launch(pair(tmp_path), grace_s=0.3)
    await run.supervisor.start()
    old = run.incarnation("decode-0")
    os.kill(run.pid("decode-0"), signal.SIGSTOP)
    await until(lambda: run.incarnation("decode-0") != old and run.state("decode-0") is State.READY)


async def test_a_service_is_up_before_the_instances_that_need_it_start(launch: Make, tmp_path: Path) -> None:
    """Start order follows depends_on; a service is up when its ports accept connections."""
    service = fake_member("store", Proof.NOTHING, tmp_path, "--start-delay", "0.5")
    service = Member(service.name, service.proof, service.plan, None, ports=service.ports)
    run = launch([service, fake_member("prefill-0", Proof.NOTHING, tmp_path, depends_on=("store",))])
    await run.supervisor.start()
    order = [(v.name, v.state.value) for v in run.listener.heard]
    assert order.index(("store", "ready")) < order.index(("prefill-0", "starting"))


async def test_hurry_kills_what_ignores_sigterm(launch: Make, tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for the grace period of any group."""
    run = launch(pair(tmp_path, "--ignore-term"), grace_s=300)
    await run.supervisor.start()
    stopping = asyncio.create_task(run.supervisor.stop([["prefill-0"], ["decode-0"]]))
    await until(lambda: run.state("prefill-0") is State.STOPPING)
    run.supervisor.hurry()
    async with asyncio.timeout(20):
        await stopping
    assert run.tree() == []


async def test_a_stop_while_instances_start_ends_them(launch: Make, tmp_path: Path) -> None:
    """Ctrl-C during the load of a model leaves nothing."""
    run = launch(pair(tmp_path, "--hang-at-start"))
    starting = asyncio.create_task(run.supervisor.start())
    await until(lambda: len(run.tree()) >= 4)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await run.supervisor.stop()
    assert run.tree() == []


async def test_an_instance_comes_back_although_the_log_folder_vanished(launch: Make, tmp_path: Path) -> None:
    """Cleaned away while the engine ran: the restart makes it again, and needs nobody to do so."""
    run = launch([fake_member("prefill-0", Proof.NOTHING, tmp_path)])
    await run.supervisor.start()
    folder = tmp_path / "logs"
    folder.rename(tmp_path / "away")
    run.supervisor.record_run()
    before = run.pid("prefill-0")
    os.kill(before, signal.SIGKILL)
    await until(lambda: run.state("prefill-0") is State.READY and run.pid("prefill-0") != before)
    assert not any("could not be started" in v.detail for v in run.listener.heard)
    assert "disagg starts prefill-0" in (folder / "prefill-0.log").read_text()


async def test_an_instance_comes_back_although_its_log_cannot_be_written(launch: Make, tmp_path: Path) -> None:
    """What took the folder's place does not keep an engine from serving."""
    run = launch([fake_member("prefill-0", Proof.NOTHING, tmp_path)])
    await run.supervisor.start()
    (tmp_path / "logs").rename(tmp_path / "away")
    (tmp_path / "logs").touch()
    before = run.pid("prefill-0")
    os.kill(before, signal.SIGKILL)
    await until(lambda: run.state("prefill-0") is State.READY and run.pid("prefill-0") != before)


async def test_run_json_names_the_processes(launch: Make, tmp_path: Path) -> None:
    """Somebody who looks at the folder of a run finds every pid and log."""
    run = launch([fake_member("prefill-0", Proof.NOTHING, tmp_path)])
    await run.supervisor.start()
    run.supervisor.record_run(endpoint="http://127.0.0.1:1")
    text = (tmp_path / "logs" / "run.json").read_text()
    assert f'"pid": {run.pid("prefill-0")}' in text
    assert f'"pid": {os.getpid()}' in text
