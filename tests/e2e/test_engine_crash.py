"""Engines die under load: other requests go on, the instance comes back, and the books close."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.waiting import engines_are_idle, every_instance_is_ready
from tests.support.deployment import Deployment
from tests.support.wire import Answer, request

pytestmark = pytest.mark.parametrize("shape", ["2P2D"], indirect=True)


@contextmanager
def _load(url: str, workers: int = 3) -> Iterator[list[Answer]]:
    """Short requests from a few clients until the block ends; the list grows as they are answered."""
    answers: list[Answer] = []
    stop = threading.Event()

    def client(number: int) -> None:
        count = 0
        while not stop.is_set():
            body = {"model": MODEL, "prompt": f"Client {number} asks {count}:", "max_tokens": 8, "temperature": 0}
            answers.append(request(url, "/v1/completions", body))
            count += 1

    threads = [threading.Thread(target=client, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_killed_instance_comes_back_and_the_others_go_on(shape: Deployment, stage: str) -> None:
    """SIGKILL of one engine under load: no request is lost, and 20 requests after its return all succeed."""
    with _load(shape.url) as answers:
        _wait_for(answers, 6)
        os.kill(shape.engine_pid(stage, 0), signal.SIGKILL)
        _wait_for(answers, len(answers) + 12)
    assert all(a.status in {200, 502, 503, 504} for a in answers), [a.body[:200] for a in answers if a.status != 200]
    failed = [a.body for a in answers if a.status != 200]
    assert failed == [], f"{len(failed)} of {len(answers)} requests failed although another instance was there"
    every_instance_is_ready(shape, within_s=300)
    after = [
        request(shape.url, "/v1/completions", {"model": MODEL, "prompt": f"After {n}", "max_tokens": 4})
        for n in range(20)
    ]
    assert [a.status for a in after] == [200] * 20
    assert {a.headers[f"x-disagg-{stage}"] for a in after} == {f"{stage}-0", f"{stage}-1"}
    assert {a.headers["x-disagg-path"] for a in after} == {"disaggregated"}
    engines_are_idle(shape, within_s=30)


def _wait_for(answers: list[Answer], count: int, within_s: float = 240) -> None:
    deadline = time.monotonic() + within_s
    while len(answers) < count:
        assert time.monotonic() < deadline, f"{len(answers)} of {count} requests answered in {within_s} s"
        time.sleep(0.1)
