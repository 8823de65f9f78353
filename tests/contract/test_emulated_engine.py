"""What an engine with NIXL pull does that a router can see, written once for the emulated engine and the real one.

Without further ado it runs against a pair of emulated engines. To hold the emulation against the real engine, start a
real pair and name it: ``DISAGG_CONTRACT_PAIR=http://127.0.0.1:9900,http://127.0.0.1:9800`` (prefill, decode), both
with ``--enable-prompt-tokens-details`` off and a context of at least 512 tokens; nothing else may use it meanwhile.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.contract.engine_pair import (
    CHAT,
    COMPLETIONS,
    HANDLE_KEYS,
    Pair,
    body,
    chat_body,
    fresh,
    get,
    metric,
    ok,
    prefill,
    settled,
    words_of,
)
from tests.support.wire import request
from tests.unit.engines_emulated.running import pair as emulated_pair
from tests.unit.engines_emulated.running import running

REAL = os.environ.get("DISAGG_CONTRACT_PAIR")


@pytest.fixture(scope="module", params=["emulated", *(["real"] if REAL else [])])
def engines(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The pair under test."""
    with running(*emulated_pair()) if request.param == "emulated" else nullcontext() as up:
        urls = [up.url(0), up.url(1)] if up is not None else str(REAL).split(",")
        card = get(urls[0], "/v1/models").json()["data"][0]
        yield Pair(urls[0], urls[1], card["id"], card["max_model_len"])


@pytest.fixture(autouse=True)
def _books_close(engines: Pair) -> Iterator[None]:
    """After each test nothing runs, waits or is held on either engine."""
    yield
    for url in (engines.prefill, engines.decode):
        settled(url, "vllm:num_requests_running", 0)
        settled(url, "vllm:num_requests_waiting", 0)
        settled(url, "vllm:kv_cache_usage_perc", 0)


# Answers.


def test_a_completion_has_every_key_of_the_real_one(engines: Pair) -> None:
    """Keys in their order, the object's name, one choice, and usage that adds up."""
    answer = ok(request(engines.decode, COMPLETIONS, body(engines, prompt=fresh())))
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == engines.model
    assert answer["kv_transfer_params"] is None
    (choice,) = answer["choices"]
    assert list(choice) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids"),
        *("prompt_logprobs", "prompt_token_ids", "routed_experts"),
    ]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    usage = answer["usage"]
    assert list(usage) == [
        *("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details")
    ]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_a_chat_answer_has_every_key_of_the_real_one(engines: Pair) -> None:
    """The same for chat, whose message comes without an empty list of tool calls."""
    answer = ok(request(engines.decode, CHAT, chat_body(engines, fresh())))
    assert list(answer) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert list(choice) == [
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
    ]
    assert list(choice["message"]) == [
        *("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning")
    ]
    assert choice["message"]["role"] == "assistant"


def test_the_request_id_header_names_the_answer(engines: Pair) -> None:
    """X-Request-Id becomes part of the id, behind the API's prefix."""
    for path, prefix, sent in (
        (COMPLETIONS, "cmpl", body(engines, prompt=fresh())),
        (CHAT, "chatcmpl", chat_body(engines, fresh())),
    ):
        answer = request(engines.decode, path, sent, headers={"x-request-id": "mine-7"})
        assert ok(answer)["id"] == f"{prefix}-mine-7"


@pytest.mark.parametrize("usage", [False, True])
def test_a_completion_stream_says_what_the_whole_answer_says(engines: Pair, usage: bool) -> None:
    """Text deltas in order, the finish reason once, a usage chunk only if asked for, then [DONE] and nothing more."""
    sent = body(engines, prompt=fresh())
    whole = ok(request(engines.decode, COMPLETIONS, sent))
    sent["stream"] = True
    if usage:
        sent["stream_options"] = {"include_usage": True}
    answer = request(engines.decode, COMPLETIONS, sent)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = answer.events()
    assert done == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == {k: v for k, v in whole["usage"].items() if v is not None}
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert list(chunks[0]["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat_stream_begins_with_the_role(engines: Pair) -> None:
    """One chunk with role and empty content, then content; the final chunk alone has a stop reason."""
    sent = chat_body(engines, fresh())
    whole = ok(request(engines.decode, CHAT, sent))
    answer = request(engines.decode, CHAT, {**sent, "stream": True, "stream_options": {"include_usage": True}})
    first, *chunks, usage, done = answer.events()
    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == whole["choices"][0]["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert ["stop_reason" in c["choices"][0] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["choices"] == []


def test_one_token_is_one_chunk(engines: Pair) -> None:
    """max_tokens 1 streams one content chunk, which carries the end."""
    answer = request(engines.decode, COMPLETIONS, body(engines, prompt=fresh(), max_tokens=1, stream=True))
    chunk, done = answer.events()
    assert (chunk["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


def test_the_larger_of_two_limits_has_a_rule(engines: Pair) -> None:
    """max_completion_tokens wins over max_tokens; what does not fit the context is cut."""
    answer = ok(request(engines.decode, CHAT, chat_body(engines, fresh(), max_tokens=1, max_completion_tokens=3)))
    assert answer["usage"]["completion_tokens"] == 3
    prompt = [5] * (engines.max_model_len - 4)
    answer = ok(request(engines.decode, COMPLETIONS, body(engines, prompt=prompt, max_tokens=100)))
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_and_is_cut_off(engines: Pair, stream: bool) -> None:
    """Neither text nor stream shows it; the reason is told, and its tokens count."""
    sent = body(engines, prompt=fresh(), max_tokens=16)
    text = ok(request(engines.decode, COMPLETIONS, sent))["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    answer = request(engines.decode, COMPLETIONS, {**sent, "stop": [stop], "stream": stream})
    choices = [event["choices"][0] for event in answer.events()[:-1]] if stream else [ok(answer)["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_several_choices_and_prompts_come_back_by_index(engines: Pair) -> None:
    """n choices of each prompt, numbered through; prompts are counted once each."""
    prompts = [fresh(), fresh(20)]
    sent = body(engines, prompt=prompts, n=2, temperature=1, seed=3)
    answer = ok(request(engines.decode, COMPLETIONS, sent))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 32
    alone = [ok(request(engines.decode, COMPLETIONS, body(engines, prompt=p)))["usage"] for p in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in alone)


def test_log_probabilities_have_their_two_shapes(engines: Pair) -> None:
    """Chat: a list of entries with alternatives. Completions: four lists of equal length."""
    answer = ok(request(engines.decode, CHAT, chat_body(engines, fresh(), logprobs=True, top_logprobs=2)))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert all(list(e) == ["token", "logprob", "bytes", "top_logprobs"] for e in content)
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] <= 0 for e in content)
    answer = ok(request(engines.decode, COMPLETIONS, body(engines, prompt=fresh(), logprobs=1)))
    logprobs = answer["choices"][0]["logprobs"]
    assert sorted(logprobs) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]


# Refusals.


class Refusal(NamedTuple):
    """What is sent, and what comes back."""

    path: str
    sent: dict[str, Any] | bytes
    status: int
    kind: str
    words: str


REFUSALS: list[tuple[str, dict[str, Any] | bytes, int, str, str]] = [
    (
        COMPLETIONS,
        {"prompt": "x", "model": "no-such-model"},
        404,
        "NotFoundError",
        "The model `no-such-model` does not",
    ),
    (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 3, "min_tokens": 4},
        400,
        "BadRequestError",
        "min_tokens must be less",
    ),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature must be non-negative"),
    (COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "BadRequestError", "n must be 1 when using greedy"),
    (COMPLETIONS, {"prompt": ""}, 400, "BadRequestError", "Either prompt or prompt_embeds must be provided"),
    (COMPLETIONS, {"prompt": [7] * 200_000}, 400, "BadRequestError", "maximum context length is"),
    (
        COMPLETIONS,
        {"prompt": "x", "stream_options": {"include_usage": True}},
        400,
        "BadRequestError",
        "Stream options",
    ),
    (COMPLETIONS, {"prompt": "x", "kv_transfer_params": "none"}, 400, "Bad Request", "1 validation error"),
    (COMPLETIONS, {"prompt": []}, 400, "BadRequestError", "You must pass at least one prompt"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "BadRequestError", "top_k must be 0 (disable), or at least 1"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "BadRequestError", "suffix is only supported for models with"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "BadRequestError", "is not None and empty!"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"x": 1}}, 400, "BadRequestError", "cannot be converted to integer"),
    (COMPLETIONS, {"prompt": "x", "n": None}, 400, "Bad Request", "Input should be a valid integer"),
    (COMPLETIONS, b"null", 400, "Bad Request", "Field required"),
    (CHAT, {"messages": []}, 400, "BadRequestError", "Cannot apply chat template to an empty conversation."),
    (CHAT, {}, 400, "Bad Request", "Field required"),
    (CHAT, {"messages": [], "max_tokens": "many"}, 400, "Bad Request", "unable to parse string as an integer"),
    (CHAT, b'{"messages": ', 400, "Bad Request", "JSON decode error"),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("case", [Refusal(*row) for row in REFUSALS])
def test_what_is_refused_and_how(engines: Pair, side: str, case: Refusal) -> None:
    """Status, error type and message of the real engine, in its one JSON shape."""
    answer = request(getattr(engines, side), case.path, case.sent)
    assert answer.status == case.status
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"]) == (case.kind, case.status)
    assert case.words in error["message"]


def test_other_paths_and_methods(engines: Pair) -> None:
    """The framework's own refusals have another shape."""
    missing = request(engines.decode, "/v1/nothing")
    assert (missing.status, missing.json()) == (404, {"detail": "Not Found"})
    wrong = request(engines.decode, CHAT)
    assert (wrong.status, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong.headers["allow"] == "POST"
    garbled = request(engines.decode, CHAT, b'{"messages": "\xff"}')
    assert (garbled.status, garbled.json()) == (400, {"detail": "There was an error parsing the body"})


def test_what_an_engine_tells_about_itself(engines: Pair) -> None:
    """Health without a body, a version, the model's card."""
    health = get(engines.decode, "/health")
    assert (health.status, health.body) == (200, b"")
    assert list(get(engines.decode, "/version").json()) == ["version"]
    (card, *_rest) = get(engines.decode, "/v1/models").json()["data"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} <= set(card)


# Handoff.


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_handoff_gives_the_words_and_usage_of_one_engine(engines: Pair, path: str) -> None:
    """Handle complete and turned round; decode counts the whole prompt as fetched; prefill's blocks come home."""
    prompt = fresh()
    sent = chat_body(engines, prompt) if path == CHAT else body(engines, prompt=prompt)
    first = prefill(engines, path, sent)
    params = first["kv_transfer_params"]
    assert set(params) == HANDLE_KEYS
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["transfer_mode"], params["remote_blocks_expiry_time"]) == ("pull", None)
    assert params["remote_num_tokens"] == first["usage"]["prompt_tokens"]
    assert len(params["remote_block_ids"]) == 1
    assert first["usage"]["completion_tokens"] == 1
    assert metric(engines.prefill, "vllm:kv_cache_usage_perc") > 0
    fetched = metric(engines.decode, "vllm:external_prefix_cache_hits_total")
    second = ok(request(engines.decode, path, {**sent, "kv_transfer_params": params}))
    settled(engines.prefill, "vllm:kv_cache_usage_perc", 0)
    settled(engines.decode, "vllm:external_prefix_cache_hits_total", fetched + params["remote_num_tokens"])
    alone = ok(request(engines.prefill, path, sent))
    assert words_of(path, second) == words_of(path, alone)
    assert second["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert second["usage"]["completion_tokens"] == 8
    assert second["kv_transfer_params"] is None


def test_prefill_that_stops_by_itself_still_hands_over(engines: Pair) -> None:
    """A stop string met by the first token ends prefill with `stop`, with a handle all the same."""
    sent = body(engines, prompt=fresh(), max_tokens=1)
    said = ok(request(engines.prefill, COMPLETIONS, sent))["choices"][0]["text"]
    answer = prefill(engines, COMPLETIONS, {**sent, "stop": [said[-1]]})
    assert answer["choices"][0]["finish_reason"] == "stop"
    params = answer["kv_transfer_params"]
    second = ok(request(engines.decode, COMPLETIONS, {**sent, "stop": [said[-1]], "kv_transfer_params": params}))
    assert second["choices"][0]["finish_reason"] == "stop"


def test_a_streamed_decode_leg_is_an_ordinary_stream(engines: Pair) -> None:
    """Nothing of the handoff shows in the chunks."""
    sent = chat_body(engines, fresh())
    params = prefill(engines, CHAT, sent)["kv_transfer_params"]
    answer = request(engines.decode, CHAT, {**sent, "stream": True, "kv_transfer_params": params})
    *chunks, done = answer.events()
    assert done == "[DONE]"
    assert b"kv_transfer_params" not in answer.body
    assert len(chunks) == 9


def test_prefill_without_the_request_keeps_nothing(engines: Pair) -> None:
    """`do_remote_decode: false`, or no parameters: an ordinary answer, no handle."""
    sent = body(engines, prompt=fresh(), max_tokens=1)
    assert ok(request(engines.prefill, COMPLETIONS, sent))["kv_transfer_params"] is None
    off = {"do_remote_decode": False, "do_remote_prefill": False}
    assert ok(request(engines.prefill, COMPLETIONS, {**sent, "kv_transfer_params": off}))["choices"]


def test_a_refused_decode_leg_frees_prefill(engines: Pair) -> None:
    """Decode tells prefill when it will not read."""
    sent = body(engines, prompt=fresh())
    params = prefill(engines, COMPLETIONS, sent)["kv_transfer_params"]
    refused = {**sent, "temperature": -1, "kv_transfer_params": params}
    assert request(engines.decode, COMPLETIONS, refused).status == 400
    settled(engines.prefill, "vllm:kv_cache_usage_perc", 0)


def test_a_client_that_leaves_stops_the_work(engines: Pair) -> None:
    """A closed connection ends a long decode; the autouse fixture sees that nothing is left of it."""
    sent = body(engines, prompt=fresh(), max_tokens=engines.max_model_len // 2, stream=True)
    parts = urlsplit(engines.decode)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(sent), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    connection.close()


def test_kv_from_nowhere_fails_the_request_alone(engines: Pair) -> None:
    """An unknown incarnation at a closed port: 500 without a cause, or recomputed; the next request is fine."""
    sent = body(engines, prompt=fresh())
    params = prefill(engines, COMPLETIONS, sent)["kv_transfer_params"]
    lost = {**params, "remote_engine_id": str(uuid4()), "remote_port": 1}
    answer = request(engines.decode, COMPLETIONS, {**sent, "kv_transfer_params": lost})
    if answer.status != 200:
        assert (answer.status, answer.json()["error"]["message"]) == (500, "Internal server error")
    assert request(engines.decode, COMPLETIONS, {**sent, "kv_transfer_params": params}).status == 200
