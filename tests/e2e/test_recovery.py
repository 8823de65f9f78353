"""A decode engine is killed or frozen in mid-stream: with `recover_streams` the client does not notice."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import COMMON, MODEL
from tests.e2e.waiting import every_instance_is_ready
from tests.support.deployment import Deployment, deployment
from tests.support.wire import metric, request

_KILL_AT = 12
_PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me a story about a robot."}]},
    "/v1/completions": {"prompt": "Once upon a time, a small robot"},
}


class Story(NamedTuple):
    """What a client makes of a stream."""

    text: str
    ids: int
    roles: int
    bill: list[tuple[int, int]]
    finish: list[str]
    errors: list[Any]


@pytest.fixture(scope="module")
def recovering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1P2D with recovery on."""
    log: Path = tmp_path_factory.mktemp("recovery") / "serve.log"
    with deployment([*COMMON, "--recover-streams", "--idle-timeout-s", "15"], log, {"prefill": 1, "decode": 2}) as up:
        yield up


def _stream(url: str, path: str, body: dict[str, Any], on_event: Callable[[int, str], None]) -> Story:
    """Read a stream line by line; `on_event` gets each event's number and the decode instance's name."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    decode = response.getheader("x-disagg-decode") or ""
    text, ids, roles, bill, finish, errors = "", set(), 0, [], [], []
    number = 0
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        number += 1
        on_event(number, decode)
        chunk = json.loads(line[6:])
        if "error" in chunk:
            errors.append(chunk["error"])
            continue
        ids.add(chunk["id"])
        if chunk.get("usage"):
            bill.append((chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]))
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            roles += "role" in delta
            text += delta.get("content") or choice.get("text") or ""
            finish += [choice["finish_reason"]] if choice.get("finish_reason") else []
            assert not choice.get("token_ids"), "ids that the client did not ask for"
    connection.close()
    return Story(text, len(ids), roles, bill, finish, errors)


@pytest.mark.parametrize(
    ("path", "blow"), [("/v1/chat/completions", signal.SIGKILL), ("/v1/completions", signal.SIGSTOP)]
)
def test_a_stream_survives_its_decode_engine(recovering: Deployment, path: str, blow: signal.Signals) -> None:
    """Words, id, role, end and bill are those of a run that nothing happened to."""
    body = {
        "model": MODEL,
        **_PATHS[path],
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    every_instance_is_ready(recovering, within_s=300)
    undisturbed = _stream(recovering.url, path, body, lambda _number, _decode: None)
    struck: list[int] = []

    def strike(number: int, decode: str) -> None:
        if number == _KILL_AT:
            # A frozen engine keeps its connections and says nothing.
            struck.extend(recovering.engine_pids("decode", int(decode[-1])))
            for pid in struck:
                os.kill(pid, blow)

    before = _resumed(recovering)
    try:
        disturbed = _stream(recovering.url, path, body, strike)
        assert disturbed == undisturbed
        assert disturbed.ids == 1
        assert _resumed(recovering) == before + 1
    finally:
        if blow is signal.SIGSTOP:
            for pid in struck:
                os.kill(pid, signal.SIGCONT)


def _resumed(running: Deployment) -> float:
    page = request(running.url, "/metrics").body.decode()
    return metric(page, "disagg_stream_recoveries_total", outcome="resumed")
