"""`kv-affinity` on real engines: a prompt goes where its KV is, as the engines themselves tell, restarts included."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.corpus import BLOCK
from tests.e2e.waiting import every_instance_is_ready
from tests.support.deployment import Deployment
from tests.support.wire import metric, request

pytestmark = pytest.mark.parametrize("shape", ["2P1D"], indirect=True)
_BLOCKS = 4


def _prompt(number: int) -> list[int]:
    """Four whole blocks and a bit, which no other request shares."""
    return [2000 + number * 60 + n % 53 for n in range(_BLOCKS * BLOCK + 20)]


def _home(shape: Deployment, number: int) -> str:
    """Which prefill instance serves a prompt."""
    body = {"model": MODEL, "prompt": _prompt(number), "max_tokens": 2, "temperature": 0}
    answer = request(shape.url, "/v1/completions", body)
    assert (answer.status, answer.headers["x-disagg-path"]) == (200, "disaggregated"), answer.body
    return answer.headers["x-disagg-prefill"]


def _held(shape: Deployment, name: str) -> float:
    return metric(request(shape.url, "/metrics").body.decode(), "disagg_kv_index_blocks", engine=name)


def _hits(shape: Deployment) -> list[float]:
    return [metric(page, "vllm:prefix_cache_hits_total") for page in shape.engine_metrics("prefill")]


def _soon(what: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _settle(shape: Deployment, number: int) -> str:
    """Where a new prompt is computed, once the router has heard of its blocks."""
    before = {name: _held(shape, name) for name in ("prefill-0", "prefill-1")}
    home = _home(shape, number)
    _soon(lambda: _held(shape, home) >= before[home] + _BLOCKS)
    return home


def test_a_prompt_goes_where_its_kv_is_until_that_instance_starts_anew(shape: Deployment) -> None:
    """Repeated prompts hit the cache of one instance each; what a killed one held is forgotten, and learnt again."""
    every_instance_is_ready(shape, within_s=300)
    before = _hits(shape)
    homes = {number: _settle(shape, number) for number in range(4)}
    for _ in range(2):
        assert {number: _home(shape, number) for number in homes} == homes
    gained = sum(_hits(shape)) - sum(before)
    assert gained >= 2 * len(homes) * _BLOCKS * BLOCK, "each repetition finds its four blocks"

    lost = homes[0]
    os.kill(shape.engine_pid("prefill", int(lost[-1])), signal.SIGKILL)
    other = _settle(shape, 0)
    assert other != lost
    every_instance_is_ready(shape, within_s=300)
    assert _held(shape, other) > 0
    # Its cache was lost, and its prompts are at home where they were computed since.
    assert _home(shape, 0) == other
    fresh = {number: _settle(shape, number) for number in range(10, 16)}
    assert lost in fresh.values(), "the new process takes its share"
    assert {number: _home(shape, number) for number in fresh} == fresh
