"""An engine in one file of standard library: serves health, metrics and completions, and misbehaves on demand.

KV is a file per prefilled prompt in ``--kv-dir``, whose name is the handle; decode counts a hit when it finds it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import signal
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HITS = "fake:external_hits"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-dir", default="")
    parser.add_argument("--start-delay", type=float, default=0.0)
    parser.add_argument("--die", default="", help="print this and exit with code 3")
    parser.add_argument("--say", default="", help="print this at the start")
    parser.add_argument("--hang-at-start", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--children", type=int, default=0, help="helpers, which ignore SIGTERM and detach")
    parser.add_argument("--shm", default="", help="name of a shared-memory segment to leave behind")
    parser.add_argument("--no-connector", action="store_true", help="decode computes every prompt itself")
    parser.add_argument("--answers", action="store_true", help="print a line for every answered completion")
    return parser.parse_args()


def make_helpers(count: int) -> None:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(600)"
    for _ in range(count):
        # Its parent ends at once, so it is an orphan that has left the session.
        nest = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
        subprocess.run([sys.executable, "-c", nest], check=True)


def leave_segment(name: str) -> mmap.mmap:
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


class Engine(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    hits = 0.0

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", given.port), Handler)
        self.given = given


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/metrics":
            text = f'# TYPE {HITS} counter\n{HITS}_total{{engine="0"}} {self.server.hits}\n'
            self.answer(200, text.encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = len(str(body.get("prompt", "")).split())
        given = self.server.given
        answer: dict[str, Any] = {"usage": {"prompt_tokens": tokens}, "choices": []}
        if body.get("kv") == "send":
            key = uuid.uuid4().hex
            (Path(given.kv_dir) / key).write_text(str(body["prompt"]))
            answer["kv"] = key
        elif body.get("kv") and not given.no_connector:
            stored = Path(given.kv_dir) / body["kv"]
            if stored.read_text() != body["prompt"]:
                self.answer(500, b'{"error": "foreign KV"}')
                return
            stored.unlink()
            self.server.hits += tokens - 1
        if given.answers:
            print("answered", flush=True)
        self.answer(200, json.dumps(answer).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        return


def main() -> int:
    given = options()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if given.ignore_term else lambda *_: sys.exit(0))
    print("fake engine starts", flush=True)
    held = leave_segment(given.shm) if given.shm else None
    make_helpers(given.children)
    if given.say:
        print(given.say, flush=True)
    if given.hang_at_start:
        time.sleep(600)
    time.sleep(given.start_delay)
    if given.die:
        print(given.die, flush=True)
        return 3
    server = Engine(given)
    print("fake engine serves", flush=True)
    server.serve_forever(poll_interval=0.05)
    del held
    return 0


if __name__ == "__main__":
    sys.exit(main())
