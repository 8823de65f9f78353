"""Engines that are started by hand, and `disagg route` in front of them.

`disagg serve --dry-run` tells how each engine is started. These are started that way, without a launcher: who
kills one starts it again at the same address, as an operator or a cluster would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.deployment import free_ports
from tests.support.wire import Answer, request

_NEW = "<new at each start>"
ADMIN_KEY = "the admin API's own key"


@dataclass
class Engine:
    """One engine, as a plan of `disagg serve` describes it."""

    name: str
    plan: dict[str, Any]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.plan['ports']['http']}"

    def start(self) -> None:
        """Start it, with an identity and a private directory of this start."""
        assert self.process is None, f"{self.name} runs already"
        self.starts += 1
        # The engine makes sockets in it, whose names may not be long.
        private = self.folder / f"{self.name}-{self.starts}"
        private.mkdir()
        identity = {"TMPDIR": str(private), "VLLM_RPC_BASE_PATH": str(private)}
        env = {k: v for k, v in os.environ.items() if k not in self.plan["unset_env"]}
        argv = [word.replace(_NEW, uuid.uuid4().hex) for word in self.plan["argv"]]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **self.plan["env"], **identity},
                start_new_session=True,
            )

    def kill(self) -> None:
        """End all its processes at once, as the kernel does."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def metrics(self) -> str:
        """Its Prometheus text."""
        return request(self.url, "/metrics").body.decode()

    def log(self) -> str:
        """The end of what it has printed."""
        return "\n".join((self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()[-40:])


class Routed:
    """A router that has started none of its engines.

    Args:
        engines: By name, running.
        args: Further flags of `disagg route`.
        folder: For its log.
    """

    def __init__(self, engines: dict[str, Engine], args: Sequence[str], folder: Path) -> None:
        self.engines = engines
        port, admin = free_ports(2)
        self.url, self._admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
        self._log = folder / "route.log"
        stages: dict[str, list[str]] = {}
        for engine in engines.values():
            stages.setdefault(engine.name.partition("-")[0], []).append(engine.url)
        flags = [word for stage, urls in stages.items() for word in (f"--{stage}", *urls)]
        own = ["--port", str(port), "--admin-port", str(admin)]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "disagg", "route", *args, *flags, *own],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DISAGG_ADMIN_KEY": ADMIN_KEY},
            )

    def admin(self, method: str, path: str, body: object = None) -> Answer:
        """Ask the admin API."""
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        return request(self._admin, f"/admin{path}", body, headers=key, method=method)

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the admin API lists, by name."""
        return {i["name"]: i for i in self.admin("GET", "/instances").json()["instances"]}

    def wait_ready(self, within_s: float = 300.0) -> None:
        """Return when all its engines take requests."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(OSError):
                found = self.instances()
                if len(found) == len(self.engines) and all(i["state"] == "ready" for i in found.values()):
                    return
            assert self.process.poll() is None, self.output()
            for engine in self.engines.values():
                assert engine.process is None or engine.process.poll() is None, engine.log()
            assert time.monotonic() < deadline, f"{self.output()}\n" + "\n".join(
                e.log() for e in self.engines.values()
            )
            time.sleep(0.2)

    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")


@contextlib.contextmanager
def routed(
    engine_args: Sequence[str], counts: dict[str, int], route_args: Sequence[str], folder: Path
) -> Iterator[Routed]:
    """Engines and a router that is ready inside the block; all gone after it.

    Args:
        engine_args: Flags of `disagg serve` that describe the engines.
        counts: How many of each stage.
        route_args: Flags of `disagg route`.
        folder: For logs.
    """
    private = Path("/tmp") / f"d-{uuid.uuid4().hex[:8]}"
    private.mkdir()
    ports = free_ports(sum(counts.values()))
    flags = [word for stage, count in counts.items() for word in (f"--{stage}-port", _taken(ports, count))]
    # Below the range from which the system takes ports for outgoing connections.
    flags += ["--side-channel-port", str(20_000 + os.getpid() % 12_000)]
    plan = subprocess.run(
        [sys.executable, "-m", "disagg", "serve", *engine_args, *flags, "--dry-run", "--json"],
        check=True,
        capture_output=True,
    )
    engines = {p["name"]: Engine(p["name"], p, private) for p in json.loads(plan.stdout)["processes"]}
    router: Routed | None = None
    try:
        for engine in engines.values():
            engine.start()
        router = Routed(engines, route_args, folder)
        router.wait_ready()
        yield router
        router.process.send_signal(signal.SIGINT)
        assert router.process.wait(90) == 0, router.output()
    finally:
        if router is not None and router.process.poll() is None:
            router.process.kill()
            router.process.wait()
        for engine in engines.values():
            if engine.process is not None:
                engine.kill()
        shutil.rmtree(private)


def _taken(ports: list[int], count: int) -> str:
    mine = [ports.pop() for _ in range(count)]
    return ",".join(map(str, mine))
