"""Answers have the keys, in their order, and the types that vLLM 0.32 gave to the same requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.wire import request
from tests.unit.engines_emulated.running import SETTINGS, Running, running

SHAPES: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_shapes.json").read_text())
"""Recorded from a real engine: each value is the name of its type, a list stands for its first item, and equal
events that follow each other stand once."""
REFUSALS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_refusals.json").read_text())
"""Requests with the status and the whole body with which a real engine refused them."""
USER = [{"role": "user", "content": "Say hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
RESPONSE = {"model": "m", "input": "Say hi", "max_output_tokens": 5, "temperature": 0}
MESSAGE = {"model": "m", "messages": USER, "max_tokens": 5, "temperature": 0}
TOKENS = {"model": "m", "token_ids": [1, 2, 3, 4, 5, 6], "sampling_params": {"max_tokens": 4, "temperature": 0}}
FLAT_TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": SCHEMA}}
CHAT = {"model": "m", "messages": USER, "max_tokens": 60, "temperature": 0}
STREAM = {"stream": True}
RESPONSES, MESSAGES, GENERATE, CHATS = (
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/v1/chat/completions",
)
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (RESPONSES, RESPONSE),
    "responses stream": (RESPONSES, RESPONSE | STREAM),
    "responses keep": (RESPONSES, RESPONSE | {"max_output_tokens": 1, "kv_transfer_params": KEEP}),
    "responses tools req stream": (
        RESPONSES,
        RESPONSE | STREAM | {"max_output_tokens": 60, "tool_choice": "required", "tools": [FLAT_TOOL]},
    ),
    "messages": (MESSAGES, MESSAGE),
    "messages stream": (MESSAGES, MESSAGE | STREAM),
    "messages keep": (MESSAGES, MESSAGE | {"max_tokens": 1, "kv_transfer_params": KEEP}),
    "messages stop": (MESSAGES, MESSAGE | {"max_tokens": 20, "stop_sequences": list("aeio")}),
    "messages tool any stream": (
        MESSAGES,
        MESSAGE
        | STREAM
        | {
            "max_tokens": 60,
            "tools": [{"name": "get_weather", "description": "w", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "count": ("/v1/messages/count_tokens", MESSAGE),
    "generate": (GENERATE, TOKENS),
    "generate stream": (GENERATE, TOKENS | STREAM),
    "generate stream usage": (GENERATE, TOKENS | STREAM | {"stream_options": {"include_usage": True}}),
    "generate keep": (GENERATE, TOKENS | {"kv_transfer_params": KEEP, "sampling_params": {"max_tokens": 1}}),
    "generate text": (GENERATE, TOKENS | {"output_mode": "text"}),
    "generate text stream": (GENERATE, TOKENS | STREAM | {"output_mode": "text"}),
    "generate lp": (GENERATE, TOKENS | {"sampling_params": {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1}}),
    "tokenize": ("/tokenize", {"model": "m", "prompt": "hello world"}),
    "tokenize strs": ("/tokenize", {"prompt": "hello world", "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [1, 2, 3]}),
    "render chat": (f"{CHATS}/render", {"model": "m", "messages": USER, "max_tokens": 5}),
    "render completion": ("/v1/completions/render", {"model": "m", "prompt": ["a", "b"], "max_tokens": 5}),
    "render messages": (f"{MESSAGES}/render", MESSAGE),
    "render responses": (f"{RESPONSES}/render", RESPONSE),
    "tools required": (CHATS, CHAT | {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    "tools stream required": (CHATS, CHAT | STREAM | {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    "tools stream named": (
        CHATS,
        CHAT
        | STREAM
        | {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    ),
}


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    settings = replace(
        SETTINGS,
        model="m",
        served_model_names=("m",),
        scale_out=True,
        prompt_tokens_details=True,
        auto_tool_choice=True,
        tool_call_parser="hermes",
        mean_output_tokens=0,
    )
    with running(settings) as engines:
        yield engines


def compare(real: Any, ours: Any, where: str) -> None:
    """Same keys in the same order, same types; null goes with anything, since content decides about it."""
    if real is None or ours is None:
        return
    if isinstance(real, dict):
        assert isinstance(ours, dict), where
        if where.endswith("prompt_logprobs[1]"):
            real, ours = {"id": next(iter(real.values()))}, {"id": next(iter(ours.values()))}
        assert list(ours) == list(real), where
        for key in real:
            compare(real[key], ours[key], f"{where}.{key}")
    elif isinstance(real, list):
        assert isinstance(ours, list), where
        if real and ours:
            compare(real[0], ours[0], f"{where}[0]")
    else:
        assert type(ours).__name__ == real, where


def test_every_recorded_request_is_sent() -> None:
    """None of the recorded answers is left out."""
    assert set(SENT) == set(SHAPES)


@pytest.mark.parametrize("name", SENT)
def test_the_shape_of_an_answer(name: str, up: Running) -> None:
    """Key by key, event by event."""
    path, body = SENT[name]
    answer = request(up.url(), path, body)
    assert answer.status == 200, answer.body
    if not answer.headers["content-type"].startswith("text/event-stream"):
        compare(SHAPES[name], answer.json(), name)
        return
    ours: list[tuple[str | None, Any]] = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        head, _, data = block.rpartition("data: ")
        event = head.strip().removeprefix("event: ") or None
        ours.append((event, data if data == "[DONE]" else json.loads(data)))
    at = 0
    for index, (event, data) in enumerate(ours):
        # An event is like the recorded one at hand, or like the next.
        while not _fits(SHAPES[name][at], event, data):
            at += 1
            assert at < len(SHAPES[name]), f"event {index} of {name}, {event}: {data}"
    assert at == len(SHAPES[name]) - 1, f"{name} ends before {SHAPES[name][at + 1]}"


@pytest.mark.parametrize("case", REFUSALS, ids=[case["name"] for case in REFUSALS])
def test_a_refusal_is_the_real_one_word_for_word(case: dict[str, Any], up: Running) -> None:
    """Status, type, parameter and message."""
    body = case["body"]
    if body.get("token_ids") == "3000 times 1":
        body = {**body, "token_ids": [1] * 3000}
    answer = request(up.url(), case["path"], body)
    assert (answer.status, answer.json()) == (case["status"], case["answer"])


def _fits(recorded: Any, event: str | None, data: Any) -> bool:
    if recorded[0] != event or (recorded[1] == "[DONE]") != (data == "[DONE]"):
        return False
    if data == "[DONE]":
        return True
    try:
        compare(recorded[1], data, str(event))
    except AssertionError:
        return False
    return True
