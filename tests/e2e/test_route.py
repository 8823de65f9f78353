"""`disagg route` before engines that were started by hand: they leave, die, and come back at the same address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.adapter import write_adapter
from tests.e2e.compare import same
from tests.e2e.conftest import COMMON, MODEL
from tests.e2e.semantics import CHAT, Wish, comparable
from tests.support.standalone import Routed, routed
from tests.support.wire import Answer, metric, request

_SMALL = ["--kv-cache-memory-bytes", "268435456"]
# One sequence at a time on decode: what waits there is pinned on prefill.
_ENGINES = [*COMMON, *_SMALL, "--decode-max-num-seqs", "1", "--prefill-max-num-seqs", "4"]
_SPECIAL = [
    "--reasoning-parser",
    "granite",
    "--scheduling-policy",
    "priority",
    "--enable-lora",
    "--max-lora-rank",
    "8",
]
_ADAPTER = "pirate"
_ROUTE = ["--model", MODEL, "--health-interval-s", "0.5", "--recover-streams"]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    """1P1D with an adapter, a reasoning parser and priorities."""
    folder = tmp_path_factory.mktemp("route")
    adapter = write_adapter(folder / "adapter")
    flags = [*_ENGINES, *_SPECIAL, "--lora-modules", f"{_ADAPTER}={adapter}"]
    with routed(flags, {"prefill": 1, "decode": 1}, _ROUTE, folder) as running:
        yield running


def _prompt(first: int) -> list[int]:
    """Two blocks and a bit, which no other request shares."""
    return [1000 + first * 50 + n % 47 for n in range(300)]


def _ask(router: Routed, first: int, tokens: int = 8) -> Answer:
    body: dict[str, Any] = {"model": MODEL, "prompt": _prompt(first), "max_tokens": tokens, "temperature": 0}
    return request(router.url, "/v1/completions", body)


def _until(what: Callable[[], bool], within_s: float, why: Callable[[], object]) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


def _thinks() -> list[dict[str, str]]:
    """A conversation that makes the smallest model think in the parser's words."""
    told: list[dict[str, str]] = []
    for sum_, answer in (("2+2", "4"), ("3+3", "6"), ("1+1", "2"), ("5+5", "10")):
        words = f"Here is my thought process: I add {sum_}. Here is my response: {answer}."
        told += [{"role": "user", "content": f"{sum_}?"}, {"role": "assistant", "content": words}]
    return [*told, {"role": "user", "content": "4+4?"}]


def _wish(name: str, **more: Any) -> Wish:
    body = {"model": MODEL, "messages": _thinks(), "temperature": 0, "max_tokens": 32}
    return Wish(name, CHAT, {**body, **more})


_WISHES = [
    _wish("reasoning"),
    _wish("reasoning-streamed", stream=True, stream_options={"include_usage": True}),
    _wish("reasoning-hidden", include_reasoning=False),
    _wish("adapter", model=_ADAPTER),
    _wish("adapter-streamed", model=_ADAPTER, stream=True),
    _wish("adapter-message", model=_ADAPTER, logprobs=True, top_logprobs=2),
    _wish("priority", priority=3),
]


@pytest.mark.parametrize("wish", _WISHES, ids=[w.name for w in _WISHES])
def test_reasoning_adapters_and_priority_are_those_of_one_engine(router: Routed, wish: Wish) -> None:
    """The decode engine, asked alone afterwards, says the same; an adapter's KV is the adapter's on both stages."""
    ours = request(router.url, wish.path, wish.body)
    theirs = request(router.engines["decode-0"].url, wish.path, wish.body)
    assert (ours.status, theirs.status) == (200, 200), (ours.body, theirs.body)
    assert ours.headers["x-disagg-path"] == "disaggregated"
    a, b = comparable(ours), comparable(theirs)
    assert same(a, b), f"ours: {a}\ntheirs: {b}"
    base = request(router.url, CHAT, _wish("base").body).json()["choices"][0]["message"]
    if wish.name == "reasoning":
        assert ours.json()["choices"][0]["message"]["reasoning"], ours.body
    if wish.name == "adapter":
        assert ours.json()["choices"][0]["message"] != base, "the adapter changes nothing"


def test_an_adapter_is_listed_and_an_unknown_one_refused(router: Routed) -> None:
    """Both stages have it."""
    names = {card["id"] for card in request(router.url, "/v1/models").json()["data"]}
    assert names == {MODEL, _ADAPTER}
    assert request(router.url, CHAT, {"model": "nobody", "messages": _thinks()}).status == 404


def test_a_drained_prefill_engine_has_nothing_to_lose_and_comes_back_as_another_one(router: Routed) -> None:
    """It is drained once decode has its KV: its blocks are free, and killing it harms nobody. Then it starts anew."""
    engine = router.engines["prefill-0"]
    before = router.instances()["prefill-0"]["incarnation"]
    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(_ask, router, first, 24) for first in range(6)]
        _until(lambda: router.instances()["prefill-0"]["pinned_prompts"] >= 2, 120, router.output)
        drain = router.admin("POST", "/instances/prefill-0/drain", {})
        assert (drain.json()["draining"], drain.json()["drained"]) == (True, False)
        _until(lambda: bool(router.instances()["prefill-0"]["drained"]), 240, router.output)
        page = engine.metrics()
        engine.kill()
        answers = [a.result() for a in asked]
    assert metric(page, "vllm:kv_cache_usage_perc") == 0
    assert metric(page, "vllm:num_requests_running") == 0
    assert [a.status for a in answers] == [200] * 6, [a.body[:200] for a in answers]
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [24] * 6
    first = answers[0].headers["x-disagg-path"]
    assert first == "disaggregated"
    _until(lambda: router.instances()["prefill-0"]["state"] not in {"ready", "draining"}, 60, router.instances)
    assert _way(_ask(router, 50)) == (200, "local")
    assert router.admin("POST", "/instances/prefill-0/undrain", {}).status == 200
    engine.start()
    router.wait_ready()
    assert router.instances()["prefill-0"]["incarnation"] != before
    _is_handed_over(router, (60, 61))
    assert metric(engine.metrics(), "vllm:nixl_num_notifications_after_expiry_total") == 0


def test_a_decode_engine_that_was_killed_comes_back_as_another_one(router: Routed) -> None:
    """Nobody serves meanwhile; afterwards KV is handed to the new process at once, and words are the same."""
    router.wait_ready()
    before = router.instances()["decode-0"]["incarnation"]
    old = _ask(router, 100)
    assert _way(old) == (200, "disaggregated")
    router.engines["decode-0"].kill()
    assert _ask(router, 101).status == 503
    router.engines["decode-0"].start()
    router.wait_ready()
    assert router.instances()["decode-0"]["incarnation"] != before
    answers = _is_handed_over(router, (100, 102))
    assert answers[0].json()["choices"] == old.json()["choices"]


def _way(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.headers.get("x-disagg-path", "").partition(";")[0]


def _is_handed_over(router: Routed, prompts: tuple[int, ...]) -> list[Answer]:
    """Ask prompts that are new to decode: their KV comes from prefill, and no transfer fails."""
    fetched = {"name": "vllm:prompt_tokens_by_source_total", "source": "external_kv_transfer"}
    before = router.engines["decode-0"].metrics()
    answers = [_ask(router, first) for first in prompts]
    after = router.engines["decode-0"].metrics()
    assert [_way(a) for a in answers] == [(200, "disaggregated")] * len(prompts)
    failed = "vllm:nixl_num_failed_transfers_total"
    assert metric(after, failed) == metric(before, failed)
    assert metric(after, **fetched) == metric(before, **fetched) + len(prompts) * len(_prompt(0))
    return answers
