"""`disagg.serve.run` over emulated engines, as a process: crashes under load, and every way to end it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import UpstreamError
from disagg.launch import procfs
from disagg.launch.ports import taken_ports
from tests.support.launch_fakes import until
from tests.support.launch_serve import Serving

Start = Callable[..., Serving]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[Serving] = []

    def start(shape: tuple[int, int] = (1, 1), folder: str = "first", **more: Any) -> Serving:
        made.append(Serving(tmp_path / folder, shape, **more))
        return made[-1]

    yield start
    for one in made:
        await one.close()


def planned(serving: Serving) -> list[int]:
    pools = (serving.topology["prefill"], serving.topology["decode"])
    return [serving.port, *(port for pool in pools for port in pool["ports"])]


async def nothing_left(serving: Serving) -> None:
    # A dying process loses its environment, by which it is found, before it closes its sockets.
    await until(lambda: serving.tree() == [] and taken_ports(planned(serving)) == {}, 40)


class Load:
    """Clients that send one request after the other."""

    def __init__(self, serving: Serving, clients: int) -> None:
        self.results: Counter[str] = Counter()
        self._serving = serving
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(clients)]
        self._over = False

    @property
    def good(self) -> int:
        return self.results["200 disaggregated"]

    async def _client(self, number: int) -> None:
        count = 0
        while not self._over:
            count += 1
            try:
                status, path = await self._serving.complete(f"client {number} request {count} " + "word " * 60)
            except UpstreamError as error:
                self.results[str(error)] += 1
            else:
                self.results[f"{status} {path}"] += 1
            await asyncio.sleep(0.02)

    async def more(self, count: int) -> None:
        """Wait for so many further good answers."""
        goal = self.good + count
        await until(lambda: self.good >= goal, 40)

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
async def test_a_killed_instance_comes_back_while_requests_go_on(serve: Start, victim: str) -> None:
    """2P2D under load, SIGKILL of one engine: nobody notices, and it returns as a new incarnation."""
    serving = serve((2, 2))
    await serving.ready()
    load = Load(serving, 4)
    await load.more(20)
    old = serving.member(victim)
    os.kill(old["pid"], signal.SIGKILL)
    await until(lambda: serving.member(victim)["state"] != "ready")
    await load.more(10)
    await until(lambda: serving.member(victim)["state"] == "ready", 40)
    new = serving.member(victim)
    assert new["incarnation"] != old["incarnation"]
    assert new["pid"] != old["pid"]
    await load.more(20)
    await load.end()
    results = [await serving.complete(f"after {n} " + "word " * 60) for n in range(20)]
    assert results == [(200, "disaggregated")] * 20
    assert set(load.results) == {"200 disaggregated"}
    _, health = await serving.get("/health")
    assert [m["in_flight"] for m in health["instances"]] == [0, 0, 0, 0]


async def test_the_last_decode_instance_down_is_said_and_recovered_from(serve: Start) -> None:
    """1P1D without decode: the endpoint answers 503 with the reason at once, and heals."""
    serving = serve()
    await serving.ready()
    os.kill(serving.member("decode-0")["pid"], signal.SIGKILL)
    await until(lambda: serving.member("decode-0")["state"] == "backoff")
    status, health = await serving.get("/health")
    assert (status, health["missing"]) == (503, ["decode"])
    assert (await serving.complete("while it is down"))[0] == 503
    await until(lambda: serving.member("decode-0")["state"] == "ready", 40)
    assert await serving.complete("after " + "word " * 60) == (200, "disaggregated")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_ends_everything_in_order(serve: Start, number: signal.Signals) -> None:
    """Exit code 0, no process and no port left, prefill before decode; a terminal signals the whole process group."""
    serving = serve((2, 2))
    await serving.ready()
    os.killpg(serving.process.pid, number)
    assert await serving.ended() == 0
    await nothing_left(serving)
    said = serving.said()
    assert said.index("prefill-1 stopped") < said.index("decode-0 stopping")


async def test_a_stop_lets_requests_under_way_end(serve: Start) -> None:
    """A request that takes a second is answered in full although the stop comes in its middle."""
    serving = serve(engine_args={"decode-step": 0.05})
    await serving.ready()
    request = asyncio.create_task(serving.complete("a slow one", tokens=20))
    await asyncio.sleep(0.3)
    serving.process.send_signal(signal.SIGTERM)
    assert await request == (200, "disaggregated")
    assert await serving.ended() == 0


async def test_a_second_signal_does_not_wait_for_requests(serve: Start) -> None:
    """A request that would take minutes does not hold up a user who presses Ctrl-C twice."""
    serving = serve(engine_args={"decode-step": 0.5}, router={"drain_timeout_s": 600})
    await serving.ready()
    request = asyncio.create_task(serving.complete("a very slow one", tokens=1000))
    await asyncio.sleep(0.5)
    serving.process.send_signal(signal.SIGINT)
    await until(lambda: "Waiting for 1 request" in serving.said())
    serving.process.send_signal(signal.SIGINT)
    assert await serving.ended() == 0
    await asyncio.gather(request, return_exceptions=True)
    await nothing_left(serving)


async def test_a_killed_launcher_leaves_nothing(serve: Start) -> None:
    """SIGKILL of the launcher: the keepers end their engines."""
    serving = serve((2, 1))
    await serving.ready()
    assert len(serving.tree()) == 6
    serving.process.kill()
    await nothing_left(serving)


async def test_engines_do_not_outlive_a_killed_launcher_and_killed_keepers(serve: Start) -> None:
    """Nobody is left to clean up, so the kernel ends the engines."""
    serving = serve()
    await serving.ready()
    engines = [serving.member(name)["pid"] for name in ("prefill-0", "decode-0")]
    keepers = [procfs.parent_of(pid) for pid in engines]
    serving.process.kill()
    for keeper in keepers:
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
    await nothing_left(serving)


async def test_taken_ports_are_named_before_anything_starts(serve: Start) -> None:
    """All of them at once, with the process that has them; exit code 2, and nothing was started."""
    first = serve()
    await first.ready()
    second = serve(folder="second", prefill=first.topology["prefill"], decode=first.topology["decode"])
    assert await second.ended() == 2
    said = second.said()
    for stage, name in (("prefill", "prefill-0"), ("decode", "decode-0")):
        port = first.topology[stage]["ports"][0]
        assert f"{stage}.ports.0: port {port} is taken by pid {first.member(name)['pid']}" in said
    assert not (second.folder / "prefill-0.log").exists()


async def test_ports_that_are_not_given_move_past_taken_ones(serve: Start) -> None:
    """A second deployment beside a first needs nothing but another endpoint port."""
    first = serve(prefill={"replicas": 1}, decode={"replicas": 1}, link={})
    await first.ready()
    second = serve(folder="second", prefill={"replicas": 1}, decode={"replicas": 1}, link={})
    await second.ready()
    assert await second.complete("hello " * 40) == (200, "disaggregated")
    assert await first.complete("hello " * 40) == (200, "disaggregated")


async def test_an_engine_that_cannot_start_ends_the_launch_with_its_cause(serve: Start) -> None:
    """Exit code 1, the engine's own message, its log's path; what had started is ended."""
    serving = serve(engine_args={"block-size": -1})
    assert await serving.ended() == 1
    said = serving.said()
    assert "InstanceDiedError" in said
    assert str(serving.folder) in said
    await until(lambda: procfs.marked(procfs.RUN_MARK, serving.record()["run"]) == (), 20)
