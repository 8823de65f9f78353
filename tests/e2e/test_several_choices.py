"""Several choices of one prompt on real engines: the words of one engine, and a prompt that prefill has computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import COMMON, MODEL
from tests.support.deployment import Deployment, deployment
from tests.support.wire import Answer, metric, request

TEXT = "/v1/completions"
BLOCK = 128
"""Tokens per block of vLLM's cache on a CPU."""
LENGTH = 5 * BLOCK + 20
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"n": 2, "top_k": 1},
    "seeded": {"n": 3, "seed": 7},
    "beams": {"n": 3, "use_beam_search": True},
    "streamed": {"n": 4, "seed": 3, "stream": True, "stream_options": {"include_usage": True}},
}


def body_of(name: str, length: int = LENGTH) -> dict[str, Any]:
    """A request whose prompt no other request shares a block with."""
    first = 1000 + 100 * list(WISHES).index(name)
    prompt = [first + n % 89 for n in range(length)]
    return {"model": MODEL, "prompt": prompt, "temperature": 1.0, "max_tokens": 12, **WISHES[name]}


def words(answer: Answer) -> tuple[list[str], dict[str, Any]]:
    """The choices in their order, and the usage without details."""
    assert answer.status == 200, answer.body[:500]
    if not answer.body.startswith(b"data: "):
        whole = answer.json()
        texts = [c["text"] for c in sorted(whole["choices"], key=lambda c: c["index"])]
        return texts, {k: v for k, v in whole["usage"].items() if isinstance(v, int)}
    found: dict[int, str] = {}
    usage: dict[str, Any] = {}
    for event in answer.events()[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[n] for n in sorted(found)], {k: v for k, v in usage.items() if isinstance(v, int)}


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What one engine answers, asked without our router in between."""
    log = tmp_path_factory.mktemp("several-aggregated") / "serve.log"
    with deployment([*COMMON, "--colocated-device-group", "0"], log, {"colocated": 1}) as running:
        return {name: request(running.engines["colocated"][0], TEXT, body_of(name)) for name in WISHES}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, aggregated: object) -> Iterator[Deployment]:
    """One prefill and one decode engine behind one endpoint."""
    log = tmp_path_factory.mktemp("several-pair") / "serve.log"
    groups = ["--prefill-device-group", "0", "--decode-device-group", "1", "--enable-prompt-tokens-details"]
    with deployment([*COMMON, *groups], log, {"prefill": 1, "decode": 1}) as running:
        yield running


def counted(url: str) -> dict[str, float]:
    """Prompt tokens of an engine so far, by where their KV came from."""
    page = request(url, "/metrics").body.decode()
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    return {source: metric(page, "vllm:prompt_tokens_by_source_total", source=source) for source in sources}


@pytest.mark.parametrize("name", list(WISHES))
def test_choices_are_one_engines_and_decode_computes_only_the_end_of_the_prompt(
    name: str, pair: Deployment, aggregated: dict[str, Answer]
) -> None:
    """The KV comes once from prefill; every choice finds its whole blocks in decode's cache."""
    decode = pair.engines["decode"][0]
    before = counted(decode)
    answer = request(pair.url, TEXT, body_of(name))
    after = counted(decode)
    came = {source: after[source] - before[source] for source in after}
    assert words(answer) == words(aggregated[name])
    why = "beam-search" if name == "beams" else "n-greater-1"
    assert answer.headers["x-disagg-path"] == f"disaggregated;primed={why}"
    assert came["external_kv_transfer"] >= LENGTH - 1
    choices = WISHES[name]["n"]
    assert came["local_cache_hit"] >= 5 * BLOCK * choices
    if name != "beams":  # each step of a beam search is a request of its own
        assert came["local_compute"] <= 20 * choices + 1
    if not answer.body.startswith(b"data: ") and name != "beams":
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prompt_within_one_block_stays_on_decode(pair: Deployment) -> None:
    """Its one block would not be found again; the reason is told, and prefill is not asked."""
    before = counted(pair.engines["prefill"][0])
    answer = request(pair.url, TEXT, body_of("seeded", BLOCK))
    assert answer.headers["x-disagg-path"] == "local;reason=within-one-block"
    assert len(answer.json()["choices"]) == WISHES["seeded"]["n"]
    assert counted(pair.engines["prefill"][0]) == before
    assert request(pair.url, TEXT, body_of("seeded", BLOCK + 1)).headers["x-disagg-path"].startswith("disaggregated")
