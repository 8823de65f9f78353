"""`disagg serve` as a user starts it: a process of its own, real signals, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.wire import request

_MARK = "DISAGG_TEST_RUN"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


class Deployment:
    """One running `disagg serve`.

    Args:
        args: Flags after `disagg serve`, without ports.
        log: File for its own output.
        counts: Instances per stage, such as `{"prefill": 2, "decode": 1}`.
    """

    def __init__(self, args: Sequence[str], log: Path, counts: dict[str, int]) -> None:
        ports = free_ports(1 + 2 * sum(counts.values()))
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.engines: dict[str, list[str]] = {}
        self.ports = ports
        used = 1
        flags: list[str] = ["--port", str(ports[0])]
        for stage, count in counts.items():
            mine = ports[used : used + count]
            used += count
            flags += [f"--{stage}-port", ",".join(map(str, mine))]
            self.engines[stage] = [f"http://127.0.0.1:{p}" for p in mine]
        # Below the range from which the system takes ports for outgoing connections.
        flags += ["--side-channel-port", str(20_000 + ports[0] % 12_000)]
        self.log = log
        self._mark = uuid.uuid4().hex
        self._shared_memory: set[str] = set()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "disagg", "serve", *args, *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, _MARK: self._mark},
            )

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return when the endpoint says that every stage has a ready instance, all of them if it lists them."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"disagg serve ended with {self.process.returncode}:\n{self.output()}")
            with contextlib.suppress(OSError):
                if request(self.url, "/health", timeout_s=5).status == 200 and self.all_ready():
                    self._note_shared_memory()
                    return
            time.sleep(0.2)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.output()}\n{self._engine_logs()}")

    def _engine_logs(self, lines: int = 40) -> str:
        """The ends of the engines' logs, which a machine that is thrown away after the run does not keep."""
        files = sorted({f for pid in self.pids() for f in _log_files(pid)})
        return "\n".join(
            f"--- {file}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) for file in files
        )

    def all_ready(self) -> bool:
        """Whether every instance, not only one of each stage, takes traffic."""
        members = request(self.url, "/health", timeout_s=5).json()["instances"]
        return all(m["state"] == "ready" for m in members)

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def engine_metrics(self, stage: str) -> list[str]:
        """The Prometheus text of each engine of a stage."""
        return [request(url, "/metrics").body.decode() for url in self.engines[stage]]

    def pids(self) -> list[int]:
        """Every living process that descends from this deployment, wherever it was re-parented to."""
        mark = f"{_MARK}={self._mark}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def _note_shared_memory(self) -> None:
        """Remember which segments its processes hold: others on this machine come and go."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
                self._shared_memory.update(re.findall(r"/dev/shm/(\S+)", maps))

    def engine_pid(self, stage: str, index: int) -> int:
        """The main process of one engine: the one whose command line has its port and no keeper in it."""
        port = self.engines[stage][index].rpartition(":")[2]
        for pid in self.pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if (
                    port in words
                    and "--port" in words
                    and "disagg.launch.keeper" not in words
                    and "serve" not in words
                ):
                    return pid
        raise AssertionError(f"no engine process for {stage}-{index} on port {port}")

    def engine_pids(self, stage: str, index: int) -> list[int]:
        """Every process of one engine: the main one and those that it has started."""
        found = [self.engine_pid(stage, index)]
        for parent in found:
            with contextlib.suppress(OSError):
                tasks = Path(f"/proc/{parent}/task")
                found += [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return found

    def stop(self, how: signal.Signals = signal.SIGINT, timeout_s: float = 90.0) -> None:
        """Stop it and check that no process, port or shared-memory segment is left."""
        self._note_shared_memory()
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout_s)
        self.check_nothing_left()
        wanted = -how if how is signal.SIGKILL else 0
        assert code == wanted, f"disagg serve ended with {code}:\n{self.output()}"

    def check_nothing_left(self, within_s: float = 15.0) -> None:
        """Fail if a process, listening port or shared-memory segment of this deployment survives."""
        deadline = time.monotonic() + within_s
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [(p, Path(f"/proc/{p}/cmdline").read_bytes()[:200]) for p in self.pids()]
        assert left == [], f"processes left behind: {left}"
        for port in self.ports:
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(("127.0.0.1", port))
        left_over = self._shared_memory & set(os.listdir("/dev/shm"))
        assert left_over == set(), f"shared memory left behind: {left_over}"


def _log_files(pid: int) -> set[Path]:
    found: set[Path] = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = descriptor.readlink()
                if target.suffix == ".log" and target.exists():
                    found.add(target)
    return found


@contextlib.contextmanager
def deployment(
    args: Sequence[str], log: Path, counts: dict[str, int], *, stop_by: signal.Signals = signal.SIGINT
) -> Iterator[Deployment]:
    """A deployment that is ready inside the block, and gone after it, checked, however it was stopped."""
    running = Deployment(args, log, counts)
    try:
        running.wait_ready()
        yield running
        running.stop(stop_by)
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
