"""CPU time of the router process per request and per streamed chunk, and the latency that it adds.

Static backends in a process of their own stand for the engines. The peer of the latency figures is the same request
on a direct connection to a backend in the same run; a request through the router takes two legs (prefill, decode).
CPU time is the router process's own, user and system, as the kernel counts it.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.report import Report, arguments
from benchmarks.static_backend import CHUNKS
from disagg.engines.vllm.dialect import PullDialect
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.topology.spec import Stage

_EXAMPLES = """\
examples:
  python -m benchmarks.router_cpu
  python -m benchmarks.router_cpu --quick --json
"""
CONNECTIONS = (1, 16, 256)
STREAMS = 32


def _request(extra: bytes) -> bytes:
    prompt = b"word " * 200
    body = b'{"model":"m","prompt":"%b","max_tokens":64,"temperature":0%b}' % (prompt, extra)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    )
    return head % len(body) + b"authorization: Bearer key\r\n\r\n" + body


WHOLE = _request(b"")
STREAM = _request(b',"stream":true')


class _Load(asyncio.Protocol):
    """Sends the same request again and again on one connection, and times each answer."""

    def __init__(self, request: bytes, count: int, ends_with: bytes) -> None:
        self._request = request
        self._left = count
        self._ends_with = ends_with
        self._tail = b""
        self._size = 0
        self.seconds: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._tail = b""
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._tail == b"" and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"unexpected answer: {data[:200]!r}"))
            self._transport.abort()
            return
        self._tail = (self._tail + data)[-64:]
        if not self._tail.endswith(self._ends_with):
            return
        self.seconds.append(time.perf_counter() - self._started)
        self._left -= 1
        if self._left:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError("the connection was closed in mid-answer"))


async def _drive(port: int, request: bytes, connections: int, each: int) -> list[float]:
    """Run a load; seconds of every request."""
    loop = asyncio.get_running_loop()
    ends_with = b"0\r\n\r\n" if request is STREAM else b'"kv_transfer_params":null}'
    loads = [
        (await loop.create_connection(lambda: _Load(request, each, ends_with), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(load.done for load in loads))
    return [s for load in loads for s in load.seconds]


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that all threads of a process have had."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _start(*args: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-m", *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main(argv: Sequence[str] | None = None) -> int:
    """Start backend and router, measure, print."""
    assert __doc__ is not None
    parser = arguments(__doc__, _EXAMPLES)
    parser.add_argument("--as-router", type=int, metavar="PORT", help="internal: be the router in front of this port")
    args = parser.parse_args(argv)
    if args.as_router:
        uvloop.run(_be_router(args.as_router))
        return 0
    report = Report("Router on static backends", ("uvloop", "httptools", "msgspec", "prometheus-client"))
    backend, backend_port = _start("benchmarks.static_backend")
    router, router_port = _start("benchmarks.router_cpu", "--as-router", str(backend_port))
    try:
        uvloop.run(_measure(report, router.pid, router_port, backend_port, 2_000 if args.quick else 20_000))
    finally:
        for process in (router, backend):
            process.communicate()
    report.show(as_json=args.json)
    return 0


async def _measure(report: Report, pid: int, port: int, backend_port: int, requests: int) -> None:
    await _drive(port, WHOLE, 16, 50)
    direct = await _drive(backend_port, WHOLE, 1, requests // 4)
    through = await _drive(port, WHOLE, 1, requests // 4)
    p50 = report.median("p50_direct", [s * 1e3 for s in direct], "ms")
    added = report.median("p50_router", [s * 1e3 for s in through], "ms")
    report.add("added_p50", added - p50, "ms")
    report.add("ratio_p50_vs_direct", added / p50, "1")
    report.add("p99_router", statistics.quantiles([s * 1e3 for s in through], n=100)[98], "ms")
    for connections in CONNECTIONS:
        each = max(4, requests // connections)
        before, began = _cpu_s(pid), time.perf_counter()
        await _drive(port, WHOLE, connections, each)
        used, took = _cpu_s(pid) - before, time.perf_counter() - began
        report.add(f"cpu_per_request_{connections}_connections", used / (each * connections) * 1e6, "us")
        report.add(f"rate_{connections}_connections", each * connections / took, "requests/s")
    rounds = max(2, requests // 1000)
    before = _cpu_s(pid)
    await _drive(port, STREAM, STREAMS, rounds)
    report.add(f"cpu_per_chunk_{STREAMS}_streams", (_cpu_s(pid) - before) / (STREAMS * rounds * CHUNKS) * 1e6, "us")


async def _be_router(backend_port: int) -> None:
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    for stage in (Stage.PREFILL, Stage.DECODE):
        fleet.add(f"{stage}-0", stage, f"http://127.0.0.1:{backend_port}", stage)
        fleet.mark(f"{stage}-0", stage, State.READY)
    router = Router(RouterConfig(("m",)), PullDialect(), fleet)
    await router.start("127.0.0.1", 0)
    print(router.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await router.stop()


if __name__ == "__main__":
    raise SystemExit(main())
