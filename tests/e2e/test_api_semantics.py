"""Everything that the APIs have, asked of one engine and of separate stages: the answers are the same.

The engines are started with a tool parser and told to report cached tokens, so that nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.compare import same
from tests.e2e.conftest import COMMON, MODEL
from tests.e2e.semantics import Wish, comparable, wishes
from tests.support.deployment import Deployment, deployment
from tests.support.wire import Answer, request

WISHES = wishes(MODEL)
ENGINE = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]


def _ask(url: str, wish: Wish) -> Answer:
    return request(url, wish.path, wish.body)


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What one engine answers, asked without our router in between."""
    log = tmp_path_factory.mktemp("semantics-aggregated") / "serve.log"
    with deployment([*COMMON, *ENGINE, "--colocated-device-group", "0"], log, {"colocated": 1}) as running:
        return {wish.name: _ask(running.engines["colocated"][0], wish) for wish in WISHES}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, aggregated: object) -> Iterator[Deployment]:
    """One prefill and one decode engine behind one endpoint."""
    log = tmp_path_factory.mktemp("semantics-pair") / "serve.log"
    groups = ["--prefill-device-group", "0", "--decode-device-group", "1"]
    with deployment([*COMMON, *ENGINE, *groups], log, {"prefill": 1, "decode": 1}) as running:
        yield running


@pytest.mark.parametrize("wish", WISHES, ids=[w.name for w in WISHES])
def test_separate_stages_answer_as_one_engine_does(
    wish: Wish, pair: Deployment, aggregated: dict[str, Answer]
) -> None:
    """Same status, same JSON, same events in the same order; and the request took the way that it should."""
    theirs, ours = aggregated[wish.name], _ask(pair.url, wish)
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    a, b = comparable(ours, wish.apart), comparable(theirs, wish.apart)
    assert same(a, b), f"ours:   {json.dumps(a)[:3000]}\ntheirs: {json.dumps(b)[:3000]}"
    if theirs.status == 200 or wish.way in {"passed"}:
        assert ours.headers.get("x-disagg-path", "").startswith(wish.way)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/rerank", "/pooling"])
def test_what_needs_another_kind_of_model_is_refused_with_the_reason(pair: Deployment, path: str) -> None:
    """vLLM does not have these paths with a generating model: its bare 404 is not what a client gets."""
    body = {"model": MODEL, "input": "x", "text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
    answer = request(pair.url, path, body)
    assert answer.status == 501, answer.body
    assert path in answer.json()["error"]["message"]
