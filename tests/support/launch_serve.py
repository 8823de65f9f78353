"""`disagg.serve.run` as a process of its own, and a handle on it.

Run as a module it takes a topology as JSON, starts it on this machine and exits as `disagg serve` would.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from disagg.engines.registry import adapter_for
from disagg.errors import DisaggError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE
from disagg.http.origin import Origin, Outgoing
from disagg.launch import procfs
from disagg.serve import Ui, run
from disagg.topology.spec import Topology
from tests.support.launch_fakes import free_port, until

TIMES = LegTimes(20, 20, 20)


class Serving:
    """One running deployment of emulated engines."""

    def __init__(self, folder: Path, shape: tuple[int, int], **more: Any) -> None:
        folder.mkdir()
        self.folder = folder / "logs"
        self.output = folder / "output.txt"
        self.port = free_port()
        prefill, decode = shape
        self.topology: dict[str, Any] = {
            "model": "emulated",
            "platform": "emulated",
            "port": self.port,
            "log_dir": str(self.folder),
            "prefill": {"ports": [free_port() for _ in range(prefill)]},
            "decode": {"ports": [free_port() for _ in range(decode)]},
            # Below the ports that the system gives to outgoing connections.
            "link": {"side_channel_port": 20_000 + self.port % 12_000},
            **more,
        }
        self.origin = Origin.parse(f"http://127.0.0.1:{self.port}")
        self.client = Client()
        self.run = ""
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.launch_serve", json.dumps(self.topology)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Wait until every instance is."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.said()
            states = [m["state"] for m in self.record().get("members", {}).values()]
            return bool(states) and all(state == "ready" for state in states)

        await until(is_ready, 60)
        self.run = self.record()["run"]

    def record(self) -> dict[str, Any]:
        """What `run.json` says."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def member(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.record()["members"][name]
        return found

    def said(self) -> str:
        return self.output.read_text()

    def tree(self) -> list[int]:
        """Every process of the run except the launcher."""
        return list(procfs.marked(procfs.RUN_MARK, self.run))

    async def get(self, path: str) -> tuple[int, Any]:
        response = await self.client.request(self.origin, Outgoing("GET", path), TIMES)
        try:
            return response.status, json.loads(await response.read())
        finally:
            response.close()

    async def complete(self, prompt: str, tokens: int = 8) -> tuple[int, str]:
        """A completion: its status, and the path that it took."""
        body = json.dumps({"model": "emulated", "prompt": prompt, "max_tokens": tokens}).encode()
        outgoing = Outgoing("POST", "/v1/completions", (JSON_TYPE,), body)
        response = await self.client.request(self.origin, outgoing, TIMES)
        try:
            await response.read()
            return response.status, (response.header(b"x-disagg-path") or b"").decode()
        finally:
            response.close()

    async def ended(self) -> int:
        """Wait until the launcher has ended."""
        await until(lambda: self.process.poll() is not None, 40)
        assert self.process.returncode is not None
        return self.process.returncode

    async def close(self) -> None:
        await self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        if self.run:
            await until(lambda: self.tree() == [], 40)


def main() -> int:
    topology = Topology.model_validate_json(sys.argv[1])
    try:
        return run(topology, adapter_for(topology.platform), topology.model, Ui())
    except DisaggError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
