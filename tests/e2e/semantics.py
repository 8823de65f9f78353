"""Requests that use everything an API has, and how their answers are compared.

Each must get the same answer from one engine and from a disaggregated deployment of it, but for what differs between
any two requests to one engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.wire import Answer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"
EOS = 2
"""The model's end-of-sequence token, `<|im_end|>`."""

_OWN = frozenset({
    "id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "item_id", "sequence_number",
    "call_id",
})  # fmt: skip
_TEXTS = ("content", "text", "arguments", "partial_json", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Wish:
    """One request.

    Attributes:
        name: For the test report.
        path: Where to.
        body: What.
        way: What the `x-disagg-path` header begins with.
        apart: Keys that are not compared. A streamed echo tells the prompt's ids as well, which prefill's does not;
            what was created in a cache is decode's own count.
    """

    name: str
    path: str
    body: dict[str, Any]
    way: str = "disaggregated"
    apart: frozenset[str] = frozenset()


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_TOOLS = [{"type": "function", "function": _WEATHER}]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
_NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _chat(name: str, text: str = "Name one colour.", way: str = "disaggregated", **more: Any) -> Wish:
    # What decode has created in its cache is not what it was handed over, so a prompt of whole blocks shows there.
    apart = frozenset({"created_cache_tokens"} if len(text) > 1_000 else ())
    return Wish(name, CHAT, {"messages": _user(text), "temperature": 0, "max_tokens": 12, **more}, way, apart)


def _text(name: str, prompt: Any = "The capital of France is", way: str = "disaggregated", **more: Any) -> Wish:
    apart = frozenset({"prompt_token_ids"} if more.get("echo") and more.get("stream") else ())
    return Wish(name, TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": 10, **more}, way, apart)


_TIDE = "The tide is high, and the moon is near. " * 30
"""Longer than a block of any engine's cache."""


def several() -> list[Wish]:
    """Several choices of one prompt. Greedy by `top_k`, because engines refuse them at temperature 0.

    One engine counts what the second choice finds of the first as cached; here that is what prefill has found.
    """
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    apart = frozenset({"cached_tokens", "created_cache_tokens"})
    rows: list[tuple[str, bool, dict[str, Any]]] = [
        ("greedy", True, {"top_k": 1, "n": 2}),
        ("greedy", False, {"top_k": 1, "n": 3}),
        ("seeded", True, {"seed": 7, "n": 3}),
        ("seeded", False, {"seed": 5, "n": 4, "ignore_eos": True}),
        ("streamed", True, {"seed": 7, "n": 3, "stream": True, **usage}),
        ("streamed", False, {"seed": 8, "n": 2, "stream": True, **usage}),
        ("logprobs", True, {"seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}),
        ("logprobs", False, {"seed": 9, "n": 2, "logprobs": 2}),
        ("stop", True, {"seed": 4, "n": 3, "stop": ["e"], "max_tokens": 30}),
        ("stop", False, {"seed": 4, "n": 3, "stop": ["e", "a"], "max_tokens": 30, "stream": True}),
        ("one-token", False, {"seed": 4, "n": 3, "max_tokens": 1}),
        ("prompt-logprobs", True, {"seed": 4, "n": 2, "prompt_logprobs": 1}),
        ("echo", False, {"seed": 4, "n": 2, "echo": True}),
        ("echo-logprobs", False, {"seed": 4, "n": 2, "echo": True, "logprobs": 1}),
        ("echo-streamed", False, {"seed": 4, "n": 2, "echo": True, "stream": True, **usage}),
        ("list", False, {"seed": 4, "n": 2, "prompt": [_TIDE, f"So: {_TIDE}"]}),
        ("list-streamed", False, {"seed": 4, "n": 2, "prompt": [_TIDE, f"So: {_TIDE}"], "stream": True, **usage}),
        ("tools", True, {"seed": 4, "n": 2, "tools": _TOOLS, "tool_choice": "required", "max_tokens": 60}),
        ("json", True, {"seed": 4, "n": 2, "response_format": _json_schema(), "max_tokens": 40}),
        ("n-as-text", False, {"seed": 4, "n": "2"}),
        ("too-many", False, {"seed": 4, "n": 10**6}),
        ("no-number", True, {"seed": 4, "n": 2.5}),
    ]
    found = []
    for name, chat, more in rows:
        prompt = {"messages": _user(_TIDE)} if chat else {"prompt": _TIDE}
        body = {**prompt, "temperature": 1.0, "max_tokens": 10, **more}
        way = "disaggregated;primed=n-greater-1"
        kept = apart | ({"prompt_token_ids"} if name == "echo-streamed" else set())
        found.append(Wish(f"several-{'chat' if chat else 'text'}-{name}", CHAT if chat else TEXT, body, way, kept))
    settings = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 8}
    generate = {"token_ids": [1000 + n for n in range(300)], "sampling_params": settings}
    found.append(Wish("several-generate", GENERATE, generate, "disaggregated;primed=n-greater-1", apart))
    best = {"prompt": _TIDE, "temperature": 0, "max_tokens": 10, "best_of": 2, "n": 1}
    found.append(Wish("several-best-of", TEXT, best, "disaggregated;primed=best-of-greater-1", apart))
    return found


def chats() -> list[Wish]:
    """Chat completions."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    continuous: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return [
        _chat("chat"),
        _chat("chat-streamed", stream=True, **usage),
        _chat("chat-continuous-usage", stream=True, **continuous),
        _chat("chat-n", n=2),
        _chat("chat-one-token", max_tokens=1),
        _chat("chat-one-token-streamed", max_tokens=1, stream=True),
        _chat("chat-newer-cap", max_tokens=50, max_completion_tokens=3),
        _chat("chat-logprobs", logprobs=True, top_logprobs=3),
        _chat("chat-logprobs-streamed", logprobs=True, top_logprobs=2, stream=True),
        _chat("chat-prompt-logprobs", prompt_logprobs=2),
        _chat("chat-prompt-logprobs-streamed", prompt_logprobs=2, stream=True, way="local"),
        _chat("chat-token-ids", return_token_ids=True),
        _chat("chat-stop", "Count: 1, 2, 3", stop=["\n", "5"]),
        _chat("chat-stop-ids", stop_token_ids=[198, 28, 30]),
        _chat("chat-stop-included", "Count to nine.", stop=[","], include_stop_str_in_output=True, max_tokens=30),
        _chat("chat-min-tokens", "Say ok.", min_tokens=9),
        _chat("chat-ignore-eos", "Say ok.", ignore_eos=True, max_tokens=20),
        _chat("chat-eos-first", logit_bias={str(EOS): 100}),
        _chat("chat-eos-first-streamed", logit_bias={str(EOS): 100}, stream=True, **usage),
        _chat("chat-eos-ignored", logit_bias={str(EOS): 100}, ignore_eos=True, max_tokens=4),
        _chat("chat-eos-after-minimum", logit_bias={str(EOS): 100}, min_tokens=3),
        _chat("chat-seed", temperature=0.9, seed=7),
        _chat("chat-priority", priority=0),
        _chat("chat-penalties", repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        _chat("chat-tools-absent-choice", tools=_TOOLS),
        _chat("chat-tools-auto", tools=_TOOLS, tool_choice="auto"),
        _chat("chat-tools-none", tools=_TOOLS, tool_choice="none"),
        _chat("chat-tools-required", "Weather in Rome?", tools=_TOOLS, tool_choice="required", max_tokens=60),
        _chat("chat-tools-named", "Weather in Rome?", tools=_TOOLS, tool_choice=_NAMED, max_tokens=60),
        _chat("chat-tools-named-streamed", tools=_TOOLS, tool_choice=_NAMED, max_tokens=40, stream=True),
        _chat("chat-tools-required-streamed", tools=_TOOLS, tool_choice="required", max_tokens=40, stream=True),
        _chat("chat-tool-turn", messages=_tool_turn(), tools=_TOOLS),
        _chat(
            "chat-json-object", "A JSON object about Rome.", response_format={"type": "json_object"}, max_tokens=30
        ),
        _chat("chat-json-schema", "Where is the Colosseum?", response_format=_json_schema(), max_tokens=40),
        _chat("chat-json-schema-streamed", "Rome?", response_format=_json_schema(), max_tokens=40, stream=True),
        _chat("chat-choice", structured_outputs={"choice": ["red", "green"]}),
        _chat("chat-regex", structured_outputs={"regex": "[a-c]{3}"}),
        _chat("chat-echo", echo=True, add_generation_prompt=False, way="local;reason=echo"),
        _chat("chat-long", "The sea is deep. " * 150),
        _chat("chat-long-streamed", "The sky is wide. " * 150, stream=True, **usage),
        _chat("chat-long-tools", "The sun is far. " * 150, tools=_TOOLS, tool_choice="required", max_tokens=60),
        _chat("chat-template-argument", chat_template_kwargs={"custom": 1}),
        _chat("chat-no-such-model", model="nobody", way=""),
        _chat("chat-bad-cap", max_tokens=0),
        _chat("chat-bad-n", n=0),
        _chat("chat-no-messages", messages=[]),
        _chat("chat-options-without-stream", stream_options={"include_usage": True}, way="disaggregated"),
    ]


def _tool_turn() -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    return [
        *_user("Weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def _json_schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA, "strict": True}}


def texts() -> list[Wish]:
    """Text completions."""
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    ids = [[1000, 2000, 3000], [4000, 5000], [6000]]
    two = ["Roses are red,", "The sky is"]
    return [
        _text("text"),
        _text("text-ids", ids[0]),
        _text("text-streamed", stream=True, **usage),
        _text("text-logprobs", logprobs=3),
        _text("text-logprobs-streamed", logprobs=2, stream=True),
        _text("text-prompt-logprobs", prompt_logprobs=2),
        _text("text-echo", echo=True),
        _text("text-echo-ids", ids[0], echo=True),
        _text("text-echo-one-token", echo=True, max_tokens=1),
        _text("text-echo-alone", echo=True, max_tokens=0, way="local;reason=echo-alone"),
        _text("text-echo-logprobs", echo=True, logprobs=2),
        _text("text-echo-streamed", echo=True, stream=True, **usage),
        _text("text-echo-logprobs-streamed", echo=True, logprobs=1, stream=True),
        _text("text-echo-token-ids", echo=True, return_token_ids=True, way="local;reason=echo-token-ids"),
        _text("text-n", n=2),
        _text("text-list", two),
        _text("text-list-of-one", two[:1]),
        _text("text-list-of-ids", ids),
        _text("text-list-streamed", [*two, "Once upon"], stream=True, **usage),
        _text("text-list-echo-logprobs", two, echo=True, logprobs=1),
        _text("text-list-one-fails", [[5], [5] * 5000]),
        _text("text-list-empty", [], way="disaggregated"),
        _text("text-eos-first", logit_bias={str(EOS): 100}),
        _text("text-unicode", "日本の首都は 🙂"),
        _text(
            "text-truncated", list(range(1000, 1040)), truncate_prompt_tokens=8, way="local;reason=truncated-prompt"
        ),
        _text("text-too-long", [7] * 5000),
        _text("text-no-prompt", None),
        _text("text-seed", temperature=1.0, seed=3),
    ]


def others() -> list[Wish]:
    """Responses, messages, tokens-in, and what is passed on."""
    response = {"input": "Name one colour.", "temperature": 0, "max_output_tokens": 12}
    message = {"messages": _user("Name one colour."), "temperature": 0, "max_tokens": 12}
    tool = {"name": "get_weather", "description": "d", "input_schema": _WEATHER["parameters"]}
    settings = {"temperature": 0, "max_tokens": 8}
    generate = {"token_ids": [1000, 2000, 3000], "sampling_params": settings}
    return [
        Wish("response", RESPONSES, response),
        Wish("response-streamed", RESPONSES, {**response, "stream": True}),
        Wish("response-instructed", RESPONSES, {**response, "instructions": "Answer in French."}),
        Wish("response-turns", RESPONSES, {**response, "input": [*_user("I am Ada."), *_user("Who am I?")]}),
        Wish("response-schema", RESPONSES, {**response, "max_output_tokens": 40, "text": {"format": _text_format()}}),
        Wish("response-no-such-model", RESPONSES, {**response, "model": "nobody"}, ""),
        Wish("message", MESSAGES, message),
        Wish("message-streamed", MESSAGES, {**message, "stream": True}),
        Wish("message-system", MESSAGES, {**message, "system": "You are a pirate."}),
        Wish("message-stop", MESSAGES, {**message, "stop_sequences": [" "], "max_tokens": 30}),
        Wish("message-one-token", MESSAGES, {**message, "max_tokens": 1}),
        Wish("message-tools", MESSAGES, {**message, "tools": [tool], "tool_choice": {"type": "auto"}}),
        Wish("message-tool-named", MESSAGES, {**message, "tools": [tool], "max_tokens": 60,
                                              "tool_choice": {"type": "tool", "name": "get_weather"}}),
        Wish("message-bad-cap", MESSAGES, {**message, "max_tokens": 0}),
        Wish("generate", GENERATE, generate),
        Wish("generate-streamed", GENERATE, {**generate, "stream": True, "stream_options": {"include_usage": True}}),
        Wish("generate-logprobs", GENERATE, {**generate, "sampling_params": {**settings, "logprobs": 2}}),
        Wish("generate-floor", GENERATE, {**generate, "sampling_params": {**settings, "min_tokens": 6}}),
        Wish("generate-n", GENERATE, {**generate, "sampling_params": {**settings, "n": 2}}),
        Wish("generate-text", GENERATE, {**generate, "output_mode": "text"}),
        Wish("tokenize", "/tokenize", {"prompt": "Hello world"}, "passed"),
        Wish("detokenize", "/detokenize", {"tokens": [1000, 2000]}, "passed"),
        Wish("count-tokens", "/v1/messages/count_tokens", {"messages": _user("Hello")}, "passed"),
    ]  # fmt: skip


def _text_format() -> dict[str, Any]:
    return {"type": "json_schema", "name": "place", "schema": _SCHEMA, "strict": True}


def wishes(model: str) -> list[Wish]:
    """All of them, for a model."""
    found = [*chats(), *texts(), *others(), *several()]
    return [Wish(w.name, w.path, {"model": model, **w.body}, w.way, w.apart) for w in found]


def comparable(answer: Answer, apart: frozenset[str] = frozenset()) -> object:
    """An answer without what differs between any two requests; a stream without where it was cut into chunks."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return {"status": answer.status, "body": _without(answer.json(), _OWN | apart) if answer.body else None}
    return {"status": answer.status, "stream": folded(answer.body, _OWN | apart)}


def folded(stream: bytes, apart: frozenset[str]) -> list[object]:
    """The events of a stream, by choice, where neighbours that differ in their text alone have become one."""
    assert stream.endswith(b"\n\n"), f"the stream does not end with a blank line: {stream[-80:]!r}"
    by_choice: dict[int, list[list[Any]]] = {}
    for block in stream.split(b"\n\n")[:-1]:
        name, _, data = block.rpartition(b"data: ")
        event = data.decode() if data == b"[DONE]" else _without(json.loads(data), apart)
        taken: list[Any] = []
        skeleton = _take_texts(event, taken)
        index = skeleton["choices"][0]["index"] if isinstance(skeleton, dict) and skeleton.get("choices") else -1
        events = by_choice.setdefault(index, [])
        if events and events[-1][1] == skeleton and len(events[-1][2]) == len(taken):
            events[-1][2] = [a + b for a, b in zip(events[-1][2], taken, strict=True)]
        else:
            events.append([name.decode(), skeleton, taken])
    return [by_choice[index] for index in sorted(by_choice)]


def _take_texts(value: Any, taken: list[Any]) -> Any:
    """Move the parts that grow from chunk to chunk into `taken`."""
    if isinstance(value, dict):
        kept: dict[str, Any] = {}
        for key, item in value.items():
            grows = isinstance(item, str) and (key in _TEXTS or key == "delta")
            if grows or (isinstance(item, list) and key in {"token_ids", "text_offset", "tokens", "token_logprobs",
                                                              "top_logprobs"}):  # fmt: skip
                taken.append(item)
                kept[key] = "..."
            elif key == "logprobs" and isinstance(item, dict) and isinstance(item.get("content"), list):
                taken.append(item["content"])
                kept[key] = "..."
            elif key == "usage" and isinstance(item, dict) and value.get("choices"):
                kept[key] = sorted(item)
            else:
                kept[key] = _take_texts(item, taken)
        return kept
    return [_take_texts(item, taken) for item in value] if isinstance(value, list) else value


def _without(value: Any, apart: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, apart) for key, item in value.items() if key not in apart}
    return [_without(item, apart) for item in value] if isinstance(value, list) else value
