"""Members made of `fake_engine.py`, their dialect, and what a test asks the kernel about them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from disagg.engines.base import Api, Body, Dialect, Handle, PlannedProcess, ReadinessProbe, Transfer
from disagg.errors import HandoffError
from disagg.http.origin import Origin
from disagg.launch import procfs
from disagg.launch.handoff_probe import ProbePlan
from disagg.launch.member import Member, Proof, View

ENGINE = str(Path(__file__).with_name("fake_engine.py"))
PROBE = ReadinessProbe("/health", "/metrics", "fake:external_hits", "fake:running", "fake:waiting")


class FakeDialect(Dialect):
    """Prefill writes the prompt to a file; the file's name is the handle."""

    name = "fake"
    internal_keys = frozenset({"kv"})

    def local_reason(self, api: Api, body: Body) -> str | None:
        return None

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        return msgspec.json.encode({**body, "kv": "send"})

    def read_handle(self, answer: bytes) -> Handle:
        fields = msgspec.json.decode(answer)
        if "kv" not in fields:
            raise HandoffError("prefill returned no handle.")
        return Handle(msgspec.Raw(msgspec.json.encode(fields["kv"])), "", fields["usage"]["prompt_tokens"], None)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        return msgspec.json.encode(body if handle is None else {**body, "kv": handle.params})


# The fake engine counts before it answers.
PLAN = ProbePlan("fake", FakeDialect(), PROBE, block_tokens=16, timeout_s=10.0, counter_lag_s=0.5)


@dataclass
class Listener:
    """Remembers every state that it heard of."""

    heard: list[View] = field(default_factory=list)

    def on_state(self, view: View) -> None:
        self.heard.append(view)

    def states(self, name: str) -> list[str]:
        return [view.state.value for view in self.heard if view.name == name]


_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else on this machine is given until the tests end.

    It stays bound without listening, so the system hands it out to nobody, and servers that set SO_REUSEADDR as
    engines do can still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _RESERVED.append(held)
    return int(held.getsockname()[1])


def fake_argv(port: int, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-S", ENGINE, "--port", str(port), *options)


def fake_member(
    name: str, proof: Proof, kv_dir: Path, *options: str, port: int | None = None, depends_on: tuple[str, ...] = ()
) -> Member:
    """A member whose engine gets these options at every start."""
    return changing_member(name, proof, kv_dir, lambda _: options, port=port, depends_on=depends_on)


def changing_member(
    name: str,
    proof: Proof,
    kv_dir: Path,
    options: Callable[[int], tuple[str, ...]],
    *,
    port: int | None = None,
    depends_on: tuple[str, ...] = (),
) -> Member:
    """A member whose options depend on the number of its start, from 0."""
    used = port if port is not None else free_port()
    starts = 0

    def plan(incarnation: str, run_dir: str) -> PlannedProcess:
        nonlocal starts
        argv = fake_argv(used, "--kv-dir", str(kv_dir), *options(starts))
        starts += 1
        return PlannedProcess(name, argv, {"TMPDIR": run_dir}, ports={"http": used})

    origin = Origin.parse(f"http://127.0.0.1:{used}")
    return Member(name, proof, plan, origin, ports={"http": used}, depends_on=depends_on)


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for something that has to come true; fails the test after a generous limit."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    return procfs.is_running(pid)


def segment_exists(name: str) -> bool:
    return os.path.exists(f"/dev/shm/{name}")
