"""Starts what the router benchmark compares: this project's router and its peers, each in processes of its own.

The peers live in a Python environment of their own, because their dependencies are not this project's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.static_backend import WHOLE_END

REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "peers.txt"
HOW_TO_GET_PEERS = (
    "No peers are measured. To measure them as well, give them an environment of their own once:\n"
    "  python -m benchmarks.router --make-peers .venv-peers\n"
    "and then name it:\n"
    "  python -m benchmarks.router --peer-python .venv-peers/bin/python"
)
PEERS = {"vllm-router": "vllm_router.launch_router", "sglang-router": "sglang_router.launch_router"}
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Backends:
    """Ports of the static prefill and decode backends."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Contender:
    """One router that is running."""

    name: str
    process: subprocess.Popen[bytes]
    port: int

    def cpu_s(self) -> float:
        """CPU seconds that all its processes and threads have had."""
        return sum(_cpu_s(pid) for pid in _family(self.process.pid))

    def peak_bytes(self) -> int:
        """Most memory that its processes have had resident, each at its own worst moment."""
        return sum(_status_kib(pid, "VmHWM") for pid in _family(self.process.pid)) * 1024

    def stop(self) -> None:
        """End it, with its children."""
        family = list(_family(self.process.pid))
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            for pid in family:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def make_peers(folder: str) -> int:
    """Make an environment with the peers in it; the exit code of the last command."""
    commands = (
        [sys.executable, "-m", "venv", folder],
        [f"{folder}/bin/python", "-m", "pip", "install", "-r", str(REQUIREMENTS)],
    )
    for command in commands:
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
    return 0


def peer_versions(python: str) -> dict[str, str]:
    """Versions of the peers that an environment has."""
    code = (
        "import importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    out = subprocess.run([python, "-c", code, *PEERS], check=True, capture_output=True, text=True).stdout
    return dict(line.split() for line in out.splitlines())


def start_backends() -> tuple[subprocess.Popen[bytes], Backends]:
    """Start the static backends; they end when their input is closed."""
    process = _python(sys.executable, "benchmarks.static_backend")
    assert process.stdout is not None
    prefill, decode = map(int, process.stdout.readline().split())
    return process, Backends(prefill, decode)


async def start_ours(backends: Backends, workers: int = 1) -> Contender:
    """Start this project's router."""
    ports = map(str, (backends.prefill, backends.decode, workers))
    process = _python(sys.executable, "benchmarks.own_router", *ports)
    assert process.stdout is not None
    return await _answers(Contender("disagg", process, int(process.stdout.readline())))


async def start_peer(name: str, python: str, policy: str, backends: Backends) -> Contender:
    """Start a peer in its prefill-decode mode, with one of its policies and its metrics."""
    prefill, decode = (f"http://127.0.0.1:{port}" for port in (backends.prefill, backends.decode))
    mode = ["--vllm-pd-disaggregation", "--prefill", prefill]
    if name == "sglang-router":
        mode = ["--pd-disaggregation", "--prefill", prefill, "8998"]
    port, metrics = _free_ports(2)
    process = _python(
        python,
        PEERS[name],
        *(*mode, "--decode", decode, "--policy", policy, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics), "--log-level", "error", "--worker-startup-check-interval", "1"),
    )
    return await _answers(Contender(name, process, port))


async def _answers(contender: Contender) -> Contender:
    """Wait until a router serves a request."""
    body = b'{"model":"m","prompt":"hello","max_tokens":2,"temperature":0}'
    wire = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and contender.process.poll() is None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", contender.port)
            writer.write(wire % len(body) + body)
            answer = await asyncio.wait_for(reader.readuntil(WHOLE_END), 5)
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return contender
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(0.2)
    contender.stop()
    raise SystemExit(f"{contender.name} did not serve a request within {_START_S:g} s")


def _python(python: str, module: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([python, "-m", module, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
