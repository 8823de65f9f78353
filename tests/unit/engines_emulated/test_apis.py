"""The APIs beside chat and text completions: shapes as the real engine's, and the same handoff on each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.handoff import LocalSide
from disagg.engines.emulated.sequence import Sampling, Sequence
from disagg.engines.emulated.settings import Role
from tests.support.wire import Answer, request
from tests.unit.engines_emulated.running import SETTINGS, Running, pair, running
from tests.unit.engines_emulated.test_instance import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
WORDS = "tell me about the sea " * 5
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "w", "parameters": SCHEMA}
OPEN = replace(SETTINGS, scale_out=True, auto_tool_choice=True, tool_call_parser="hermes", mean_output_tokens=0)


def events(answer: Answer) -> list[tuple[str, Any]]:
    """Named events of a stream, in order."""
    assert answer.status == 200, answer.body
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\ndata: ")
        found.append((name.removeprefix("event: "), json.loads(data)))
    return found


def sent(path: str, limit: int, params: object = None) -> dict[str, Any]:
    """A request of any API for the same words."""
    extra = {} if params is None else {"kv_transfer_params": params}
    chat = {"messages": [{"role": "user", "content": WORDS}]}
    match path:
        case "/v1/responses":
            return {"model": "toy", "input": WORDS, "max_output_tokens": limit, "temperature": 0, **extra}
        case "/v1/messages":
            return {"model": "toy", **chat, "max_tokens": limit, "temperature": 0, **extra}
        case "/inference/v1/generate":
            sampling = {"max_tokens": limit, "temperature": 0}
            return {"token_ids": list(range(300, 350)), "sampling_params": sampling, **extra}
        case "/v1/chat/completions":
            return {**chat, "max_tokens": limit, "temperature": 0, **extra}
        case _:
            return {"prompt": WORDS, "max_tokens": limit, "temperature": 0, **extra}


def said(path: str, answer: Any) -> object:
    """The words, or tokens, of a whole answer."""
    match path:
        case "/v1/responses":
            return answer["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return answer["content"][0]["text"]
        case "/inference/v1/generate":
            return answer["choices"][0]["token_ids"]
        case "/v1/chat/completions":
            return answer["choices"][0]["message"]["content"]
        case _:
            return answer["choices"][0]["text"]


def streamed(path: str, answer: Answer) -> object:
    """The words, or tokens, of a stream."""
    if path == MESSAGES:
        return "".join(e["delta"]["text"] for name, e in events(answer) if name == "content_block_delta")
    if path == RESPONSES:
        return "".join(e["delta"] for name, e in events(answer) if name == "response.output_text.delta")
    chunks = answer.events()
    assert chunks[-1] == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"]]
    if path == GENERATE:
        return [token for choice in choices for token in choice["token_ids"]]
    if path == CHAT:
        return "".join(choice["delta"].get("content", "") for choice in choices)
    return "".join(choice["text"] for choice in choices)


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running(replace(OPEN, role=Role.NONE)) as up:
        yield up


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    with running(*pair(OPEN, OPEN)) as up:
        yield up


def post(up: Running, path: str, body: object, **headers: str) -> Answer:
    return request(up.url(), path, body, headers=headers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE])
def test_each_api_hands_over_and_says_what_one_engine_says(path: str, one: Running, two: Running) -> None:
    """Prefill keeps KV on any of them, decode reads it, whole or streamed, and the words are one engine's."""
    expected = said(path, post(one, path, sent(path, 12)).json())
    assert expected
    for stream in (False, True):
        first = request(two.url(0), path, sent(path, 1, KEEP)).json()
        params = first["kv_transfer_params"]
        answer = request(two.url(1), path, {**sent(path, 12, params), "stream": stream})
        assert answer.status == 200, answer.body
        assert (streamed(path, answer) if stream else said(path, answer.json())) == expected
    assert two.state(0)["leases"] == 0


def test_an_engine_names_requests_by_api(two: Running) -> None:
    """The id that decode is told is the API's prefix, the caller's id and a suffix; responses take the body's."""
    ids = {}
    for path in (CHAT, COMPLETIONS, MESSAGES, GENERATE, RESPONSES):
        body = {**sent(path, 1, KEEP), "request_id": "resp_mine"}
        answer = request(two.url(0), path, body, headers={"x-request-id": "mine"}).json()
        ids[path] = answer["kv_transfer_params"]["remote_request_id"][:-9]
        request(two.url(1), path, sent(path, 2, answer["kv_transfer_params"]))
    assert ids == {
        CHAT: "chatcmpl-mine",
        COMPLETIONS: "cmpl-mine-0",
        MESSAGES: "chatcmpl-mine",
        GENERATE: "generate-tokens-mine",
        RESPONSES: "resp_mine_0",
    }


def test_events_of_a_streamed_response(one: Running) -> None:
    """Names in order, numbers without a gap, and the whole response at the end."""
    found = events(post(one, RESPONSES, {**sent(RESPONSES, 3), "stream": True}))
    assert [name for name, _ in found] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 3,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in found] == list(range(len(found)))
    last = found[-1][1]["response"]
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["usage"]["output_tokens"] == 3
    assert last["output"][0]["content"][0]["text"] == streamed(
        RESPONSES, post(one, RESPONSES, {**sent(RESPONSES, 3), "stream": True})
    )


def test_events_of_a_streamed_message(one: Running) -> None:
    """Anthropic's events in order, and the reason why it stopped."""
    found = events(post(one, MESSAGES, {**sent(MESSAGES, 3), "stream": True}))
    assert [name for name, _ in found] == [
        *("message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert found[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert list(found[-2][1]["usage"]) == ["input_tokens", "output_tokens"]
    assert found[-2][1]["usage"]["output_tokens"] == 3


def test_messages_count_cached_tokens_apart() -> None:
    """With --enable-prompt-tokens-details the cached part of a prompt is not among its input tokens."""
    with running(replace(OPEN, role=Role.NONE, prompt_tokens_details=True)) as up:
        cold, warm = (post(up, MESSAGES, sent(MESSAGES, 2)).json()["usage"] for _ in range(2))
    assert cold["cache_read_input_tokens"] == 0
    assert warm["cache_read_input_tokens"] > 0
    assert warm["input_tokens"] + warm["cache_read_input_tokens"] == cold["input_tokens"]


REFUSED = [
    (RESPONSES, {"model": "toy"}, 400, "body.input"),
    (RESPONSES, {**sent(RESPONSES, 1), "model": "nope"}, 404, "The model `nope` does not exist"),
    (RESPONSES, {**sent(RESPONSES, 1), "previous_response_id": "resp_x"}, 404, "'resp_x' not found"),
    (RESPONSES, {**sent(RESPONSES, 0)}, 400, "max_tokens must be at least 1, got 0."),
    (RESPONSES, {**sent(RESPONSES, 1), "background": True}, 400, "does not support `store=True`"),
    (MESSAGES, {"model": "toy", "messages": []}, 400, "body.max_tokens"),
    (MESSAGES, {**sent(MESSAGES, 0)}, 400, "max_tokens must be positive"),
    (GENERATE, {"token_ids": [1]}, 400, "body.sampling_params"),
    (GENERATE, {**sent(GENERATE, 1), "token_ids": []}, 400, "List should have at least 1 item"),
    (GENERATE, {**sent(GENERATE, 1), "token_ids": [999999]}, 400, "Token id 999999 is out of vocabulary"),
    (GENERATE, {**sent(GENERATE, 1), "token_ids": [1] * 3000}, 400, "The decoder prompt (length 3000) is longer"),
    (GENERATE, {**sent(GENERATE, 0)}, 400, "max_tokens must be at least 1, got 0."),
    ("/tokenize", {}, 400, "body.messages"),
    ("/detokenize", {}, 400, "body.tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "body.tokens.0"),
    ("/inference/v1/abort_requests", {}, 400, "Missing 'request_ids'"),
    ("/v1/chat/completions/render", {"model": "toy"}, 400, "body.messages"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_what_is_refused(path: str, body: dict[str, Any], status: int, words: str, one: Running) -> None:
    """Status and words of the real engine."""
    answer = post(one, path, body)
    assert answer.status == status, answer.body
    assert words in answer.json()["error"]["message"]


def test_messages_tell_errors_in_their_own_shape(one: Running) -> None:
    """Except for what does not fit the schema."""
    answer = post(one, MESSAGES, {**sent(MESSAGES, 1), "model": "nope"}).json()
    assert answer["type"] == "error"
    assert answer["error"] == {
        "type": "NotFoundError",
        "message": "The model `nope` does not exist. Valid aliases: toy.",
    }


def test_scale_out_is_off_unless_asked_for() -> None:
    """Token-in generation, rendering and aborts are refused with the real engine's 403."""
    with running(SETTINGS) as up:
        for path in (GENERATE, "/v1/chat/completions/render", "/inference/v1/abort_requests"):
            answer = post(up, path, sent(GENERATE, 1))
            assert answer.status == 403
            assert "--enable-scale-out" in answer.json()["error"]["message"]


def test_tokens_there_and_back(one: Running) -> None:
    """A text's tokens give the text, and a chat's tokens are what rendering says the engine would see."""
    tokens = post(one, "/tokenize", {"prompt": "hello sea"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(one, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hello sea"}
    chat = {"messages": [{"role": "user", "content": WORDS}]}
    rendered = post(one, "/v1/chat/completions/render", {**chat, "max_tokens": 5}).json()
    assert post(one, "/tokenize", chat).json()["tokens"] == rendered["token_ids"]
    sampling = {"max_tokens": 12, "temperature": 0}
    direct = post(one, GENERATE, {"token_ids": rendered["token_ids"], "sampling_params": sampling}).json()
    words = post(one, "/detokenize", {"tokens": direct["choices"][0]["token_ids"]}).json()["prompt"]
    assert words == said(CHAT, post(one, CHAT, sent(CHAT, 12)).json())


def test_counting_a_message(one: Running) -> None:
    """The count is the prompt's length in tokens."""
    count = post(one, "/v1/messages/count_tokens", sent(MESSAGES, 1)).json()["input_tokens"]
    assert count == post(one, MESSAGES, sent(MESSAGES, 1)).json()["usage"]["input_tokens"]


def test_an_abort_ends_a_request_by_its_engine_id() -> None:
    """The suffix may be left out; the client gets what there was, ended by abort."""
    with running(replace(OPEN, role=Role.NONE)) as up:
        up.instances[0].core.driver.freeze()
        answers: list[Answer] = []
        body = sent(COMPLETIONS, 50)
        caller = threading.Thread(
            target=lambda: answers.append(request(up.url(), COMPLETIONS, body, headers={"x-request-id": "mine"}))
        )
        caller.start()
        wait_until(lambda: up.state()["requests"] == 1, "the request")
        assert post(up, "/inference/v1/abort_requests", {"request_ids": ["cmpl-mine-0"]}).status == 200
        caller.join(timeout=20)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
        assert up.state()["requests"] == 0


TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
def test_a_tool_is_called(choice: object, reason: str, one: Running) -> None:
    """The call fits the schema, is the same each time, and comes in pieces when streamed."""
    body = {**sent(CHAT, 200), "tools": TOOLS, "tool_choice": choice}
    whole = post(one, CHAT, body).json()["choices"][0]
    call = whole["message"]["tool_calls"][0]["function"]
    assert (call["name"], list(json.loads(call["arguments"]))) == ("get_weather", ["city"])
    assert (whole["finish_reason"], whole["message"]["content"]) == (reason, "")
    chunks = post(one, CHAT, {**body, "stream": True}).events()[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert calls[0] == {"name": "get_weather"}
    assert "".join(part["arguments"] for part in calls[1:]) == call["arguments"]
    assert len(calls) > 2
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_a_tool_s_result_is_answered_in_words(one: Running) -> None:
    """With "auto" nothing is called again."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = post(one, CHAT, {"messages": turns, "max_tokens": 8, "tools": TOOLS}).json()["choices"][0]
    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"]


def test_a_cut_tool_call_is_plain_content(one: Running) -> None:
    """One token is no call: the prefill leg of a forced call is an ordinary answer."""
    answer = post(one, CHAT, {**sent(CHAT, 1), "tools": TOOLS, "tool_choice": "required"}).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("<", "length")


def test_tools_of_the_other_apis(one: Running) -> None:
    """Responses return a function call, messages a tool_use block, streamed or not."""
    flat = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    body = {**sent(RESPONSES, 200), "tools": [flat], "tool_choice": "required"}
    (item,) = post(one, RESPONSES, body).json()["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "completed")
    found = events(post(one, RESPONSES, {**body, "stream": True}))
    assert found[-1][1]["response"]["output"][0]["arguments"] == item["arguments"]
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    body = {**sent(MESSAGES, 200), "tools": [tool], "tool_choice": {"type": "any"}}
    answer = post(one, MESSAGES, body).json()
    assert (answer["stop_reason"], answer["content"][0]["type"]) == ("tool_use", "tool_use")
    found = events(post(one, MESSAGES, {**body, "stream": True}))
    pieces = [event["delta"]["partial_json"] for name, event in found if name == "content_block_delta"]
    assert json.loads("".join(pieces)) == answer["content"][0]["input"]


def test_structured_output_fits_its_schema(one: Running) -> None:
    """JSON of a schema, one of some choices."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    content = said(CHAT, post(one, CHAT, {**sent(CHAT, 100), "response_format": form}).json())
    assert list(json.loads(str(content))) == ["city"]
    picked = post(one, COMPLETIONS, {**sent(COMPLETIONS, 9), "structured_outputs": {"choice": ["yes", "no"]}}).json()
    assert picked["choices"][0]["text"] in {"yes", "no"}
    assert picked["choices"][0]["finish_reason"] == "stop"
    bad = post(one, CHAT, {**sent(CHAT, 9), "structured_outputs": {"json": {"type": "zz"}}})
    assert bad.json()["error"]["message"] == "Grammar error: Invalid type: zz"


def test_reasoning_is_told_apart() -> None:
    """With a parser a chat answer begins with reasoning, in a field and in deltas of its own."""
    with running(replace(OPEN, role=Role.NONE, reasoning_parser="qwen3")) as up:
        message = post(up, CHAT, sent(CHAT, 40)).json()["choices"][0]["message"]
        assert message["reasoning"]
        assert message["content"]
        assert "</think>" not in message["reasoning"] + message["content"]
        chunks = post(up, CHAT, {**sent(CHAT, 40), "stream": True}).events()[:-1]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_an_adapter_has_words_of_its_own() -> None:
    """It is listed, named in its answers, and unknown to an engine without it."""
    with running(replace(SETTINGS, lora_modules=(("ada", "/ada"),)), SETTINGS) as up:
        cards = request(up.url(), "/v1/models").json()["data"]
        assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
            ("toy", None, "toy"),
            ("ada", "toy", "/ada"),
        ]
        plain = post(up, COMPLETIONS, sent(COMPLETIONS, 8)).json()
        adapted = post(up, COMPLETIONS, {**sent(COMPLETIONS, 8), "model": "ada"}).json()
        assert adapted["model"] == "ada"
        assert said(COMPLETIONS, adapted) != said(COMPLETIONS, plain)
        assert request(up.url(1), COMPLETIONS, {**sent(COMPLETIONS, 8), "model": "ada"}).status == 404


def test_keys_guard_the_api_alone() -> None:
    """Without the key 401 on the API; health and metrics stay open."""
    with running(replace(SETTINGS, api_keys=("k1", "k2"))) as up:
        body = sent(COMPLETIONS, 1)
        assert post(up, COMPLETIONS, body).status == 401
        assert post(up, COMPLETIONS, body).json() == {"error": "Unauthorized"}
        assert post(up, COMPLETIONS, body, authorization="Bearer no").status == 401
        assert post(up, COMPLETIONS, body, authorization="Bearer k2").status == 200
        assert request(up.url(), "/v1/models").status == 401
        assert request(up.url(), "/health").status == request(up.url(), "/metrics").status == 200


def test_only_a_pooling_engine_embeds(one: Running) -> None:
    """A generating one does not know the paths; a pooling one knows no others."""
    body = {"model": "toy", "input": ["a b c", "a b c"]}
    assert post(one, "/v1/embeddings", body).json() == {"detail": "Not Found"}
    with running(replace(SETTINGS, runner="pooling", role=Role.NONE)) as up:
        data = post(up, "/v1/embeddings", body).json()["data"]
        assert data[0]["embedding"] == data[1]["embedding"]
        scores = post(up, "/score", {"text_1": "sea", "text_2": ["sea", "sun"]}).json()["data"]
        assert scores[0]["score"] == pytest.approx(1)
        ranks = post(up, "/rerank", {"query": "sea", "documents": ["sun", "sea"]}).json()["results"]
        assert ranks[0]["index"] == 1
        assert post(up, COMPLETIONS, sent(COMPLETIONS, 1)).status == 404


def test_priority_goes_first_where_it_counts() -> None:
    """With the policy on, a later request with a lower number overtakes; off, it waits its turn."""
    for priorities in (True, False):
        engine = Engine(replace(SETTINGS, priorities=priorities), LocalSide("e", "h", 1))
        for number in (5, 0, 5, -1):
            engine.add(Sequence(str(number), [1], Sampling(1), lambda _: None, priority=number))
        order = [seq.priority for seq in engine.waiting]
        assert order == ([-1, 0, 5, 5] if priorities else [5, 0, 5, -1])


def test_the_request_id_comes_back_if_wanted() -> None:
    """Only with its flag, on answers and refusals."""
    with running(replace(SETTINGS, request_id_headers=True)) as up:
        for model in ("toy", "nope"):
            answer = post(up, COMPLETIONS, {**sent(COMPLETIONS, 1), "model": model}, **{"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("tools", [5, "x", [5], {"a": 1}])
def test_tools_that_are_no_list_of_objects_are_refused(tools: object) -> None:
    """A body of the wrong kind costs its own request, and the engine serves the next one."""
    with running(OPEN) as up:
        refused = request(up.url(0), RESPONSES, {**sent(RESPONSES, 2), "tools": tools})
        assert refused.status == 400, refused.body
        assert request(up.url(0), RESPONSES, sent(RESPONSES, 2)).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_null_sampling_settings_of_a_response_are_the_defaults(stream: bool) -> None:
    """Clients send null for what they leave open."""
    with running(OPEN) as up:
        body = {**sent(RESPONSES, 2), "temperature": None, "top_p": None, "tools": None, "stream": stream}
        answer = request(up.url(0), RESPONSES, body)
        assert answer.status == 200, answer.body
        assert b'"temperature":1.0' in answer.body
        assert b'"top_p":1.0' in answer.body
