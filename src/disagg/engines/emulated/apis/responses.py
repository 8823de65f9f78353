"""`/v1/responses`: OpenAI's Responses API without state on the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any, ClassVar
from uuid import uuid4

import msgspec

from disagg.engines.emulated.answers import parsed_answer
from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.fields import Fields, problem, schema_error
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.parsing import StreamParts, call_id
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.engines.emulated.sequence import Sequence
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import BadRequestError, ClientError, DisaggError
from disagg.http.messages import Answer, error_object, json_answer

_encode = msgspec.json.Encoder().encode
_SAME = ("model", "temperature", "top_p", "stream", "kv_transfer_params", "cache_salt", "priority", "seed", "stop")


class InvalidResponseRequestError(BadRequestError):
    """What this API refuses under a name of its own."""

    kind = "invalid_request_error"


class UnknownResponseError(ClientError):
    """A response that this server does not hold: it holds none."""

    status: ClassVar[int] = 404
    exit_code: ClassVar[int] = 2
    kind: ClassVar[str] = "invalid_request_error"


class Responses(GeneratingApi):
    """The Responses API."""

    prefix = "resp"

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request. State on the server is not kept, as on a vLLM without its store."""
        fields = Fields(body)
        if body.get("input") is None:
            # The real server has put an id into the body by then, and counts it.
            shown = {"request_id": "", **body}
            fields.problems.append(problem("missing", "body.input", "Field required", shown))
        fields.done()
        if body.get("background") and body.get("store", True):
            raise InvalidResponseRequestError(
                "This vLLM engine does not support `store=True` and therefore does not support the background mode. "
                "To enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when "
                "launching the vLLM server.",
                param="background",
            )
        generation = read_generation(chat_body(body), "chat", settings, tokenizer)
        if previous := body.get("previous_response_id"):
            raise UnknownResponseError(f"Response with id '{previous}' not found.", param="response_id")
        return generation

    def identify(
        self, given: str | None, body: Mapping[str, Any], model: str, fingerprint: str, *, details: bool
    ) -> Identity:
        """The body's own id counts; the header does not."""
        name = str(body.get("request_id") or f"resp_{uuid4().hex[:16]}")
        return Identity(name, f"{name}_0", int(time.time()), model, fingerprint, details)

    def form(self, generation: Generation, identity: Identity, body: Mapping[str, Any], tokenizer: Tokenizer) -> Form:
        """Who writes the answer."""
        return ResponsesForm(generation, identity, body)


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as a chat completion."""
    out: dict[str, Any] = {key: body[key] for key in _SAME if key in body}
    out["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        out["max_tokens"] = body["max_output_tokens"]
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise schema_error(problem("list_type", "body.tools", "Input should be a valid list", tools))
    if tools:
        out["tools"] = [{"type": "function", "function": tool} for tool in tools]
        choice = body.get("tool_choice", "auto")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        out["tool_choice"] = choice
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        out["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    elif isinstance(form, dict):
        out["response_format"] = {"type": form.get("type")}
    return out


def _messages(body: Mapping[str, Any]) -> object:
    given = body.get("input")
    out: list[object] = []
    if body.get("instructions"):
        out.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        return [*out, {"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    for item in given:
        match item:
            case {"type": "function_call"}:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                out.append({"role": "assistant", "tool_calls": [call]})
            case {"type": "function_call_output"}:
                out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": str(item.get("output"))})
            case {"type": "reasoning"}:
                continue
            case {"content": list(parts)}:
                out.append({**item, "content": [_part(part) for part in parts]})
            case _:
                out.append(item)
    return out


def _part(part: object) -> object:
    if isinstance(part, dict) and part.get("type") in {"input_text", "output_text"}:
        return {"type": "text", "text": part.get("text")}
    return part


class ResponsesForm:
    """Answers of `/v1/responses`."""

    def __init__(self, generation: Generation, identity: Identity, body: Mapping[str, Any]) -> None:
        self._generation = generation
        self._identity = identity
        self._body = body
        self._parts = StreamParts(generation.constraint)
        self._shown = 0
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None
        self._text = ""

    def _response(self, output: list[dict[str, Any]], seq: Sequence | None) -> dict[str, Any]:
        """The response object; without a sequence one that has just begun."""
        body, identity = self._body, self._identity
        cut = seq is not None and seq.finish_reason == "length"
        status = "in_progress" if seq is None else "incomplete" if cut else "completed"
        tools = [_shown_tool(tool) for tool in body.get("tools") or ()]
        return {
            "id": identity.id,
            "created_at": identity.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": identity.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": _number(body, "temperature"),
            "tool_choice": body.get("tool_choice", "auto") if tools else "none",
            "tools": tools,
            "top_p": _number(body, "top_p"),
            "background": False,
            "max_output_tokens": self._generation.samplings[0].max_tokens,
            "max_tool_calls": body.get("max_tool_calls"),
            "previous_response_id": None,
            "prompt": None,
            "reasoning": body.get("reasoning"),
            "service_tier": "auto",
            "status": status,
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None if seq is None else self._usage(seq),
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None if seq is None else seq.params_out,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self, seq: Sequence) -> dict[str, Any]:
        prompt, output = len(seq.prompt), len(seq.output)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": seq.cached_tokens,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + output,
        }

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        seq = sequences[0]
        parsed = parsed_answer(seq, self._generation)
        output = []
        if parsed.reasoning:
            output.append(_reasoning(parsed.reasoning, None))
        if parsed.content or parsed.tool is None:
            output.append(_message(parsed.content, "completed"))
        if parsed.tool is not None:
            output.append(_call(call_id(), parsed.tool, parsed.arguments, "completed"))
        return _encode(self._response(output, seq))

    # Streamed.

    def _event(self, kind: str, rest: dict[str, Any]) -> bytes:
        name = rest.pop("name", None)
        event = dict(sorted({**rest, "sequence_number": self._number}.items())) | {"type": kind}
        data = _encode(event if name is None else event | {"name": name})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """The response as it begins, twice."""
        del sequences
        begun = {"response": self._response([], None)}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def delta(self, index: int, seq: Sequence) -> bytes:
        """Further text, reasoning or arguments, each in an item of its own."""
        del index
        shown = seq.visible
        text = seq.text[self._shown : shown]
        self._shown = shown
        if not self._generation.constraint.parses:
            return self._grow("message", text) if text else b""
        out = b""
        for delta in self._parts.feed(text, final=seq.finish_reason is not None):
            if "reasoning" in delta:
                out += self._grow("reasoning", delta["reasoning"])
            elif "tool_calls" not in delta:
                out += self._grow("message", delta["content"])
            elif "id" in delta["tool_calls"][0]:
                call = delta["tool_calls"][0]
                out += self._begin("function_call", _call(call["id"], call["function"]["name"], "", "in_progress"))
            else:
                out += self._grow("function_call", delta["tool_calls"][0]["function"]["arguments"])
        return out

    def _begin(self, kind: str, item: dict[str, Any]) -> bytes:
        out = self._end()
        self._open, self._text = kind, ""
        self._items.append(item)
        out += self._event("response.output_item.added", {"item": item, "output_index": len(self._items) - 1})
        if kind == "message":
            part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            out += self._event("response.content_part.added", {**self._where(), "part": part})
        return out

    def _where(self) -> dict[str, Any]:
        out: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return out if self._open == "function_call" else {"content_index": 0, **out}

    def _grow(self, kind: str, text: str) -> bytes:
        out = b""
        if self._open != kind:
            item = _message(None, "in_progress") if kind == "message" else _reasoning("", "in_progress")
            out = self._begin(kind, item)
        self._text += text
        rest = {"delta": text, **self._where()}
        if kind == "message":
            rest["logprobs"] = []
        return out + self._event(f"response.{_EVENTS[kind]}.delta", rest)

    def _end(self) -> bytes:
        """Close the item under way."""
        kind, text = self._open, self._text
        if kind is None:
            return b""
        where, item = self._where(), self._items[-1]
        if kind == "function_call":
            out = self._event(
                "response.function_call_arguments.done", {"arguments": text, **where, "name": item["name"]}
            )
            item = {**item, "arguments": text, "status": "completed"}
        elif kind == "message":
            part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
            out = self._event("response.output_text.done", {**where, "logprobs": [], "text": text})
            out += self._event("response.content_part.done", {**where, "part": part})
            item = {**item, "content": [part], "status": "completed"}
        else:
            out = self._event("response.reasoning_text.done", {**where, "text": text})
            item = {**item, "content": [{"text": text, "type": "reasoning_text"}], "status": "completed"}
        self._items[-1], self._open = item, None
        return out + self._event("response.output_item.done", {"item": item, "output_index": len(self._items) - 1})

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The end of the last item, and the whole response."""
        return self._end() + self._event(
            "response.completed", {"response": self._response(self._items, sequences[0])}
        )

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, which ends it."""
        return b"event: error\ndata: %b\n\n" % _encode({**error_object(error), "type": "error"})

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return json_answer(error.status, error_object(error))


_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def _number(body: Mapping[str, Any], name: str) -> float:
    """A checked sampling setting; null is the default, as if it was absent."""
    value = body.get(name)
    return 1.0 if value is None else float(value)


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description")
    return {name: tool.get(name) for name in (*names, "output_schema")}


def _message(text: str | None, status: str) -> dict[str, Any]:
    part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {
        "id": f"msg_{uuid4().hex[:16]}",
        "content": [] if text is None else [part],
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def _reasoning(text: str, status: str | None) -> dict[str, Any]:
    content = [{"text": text, "type": "reasoning_text"}] if text else []
    return {
        "id": f"rs_{uuid4().hex[:16]}",
        "summary": [],
        "type": "reasoning",
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def _call(call: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "call_id": call,
        "name": name,
        "type": "function_call",
        "id": f"fc_{uuid4().hex[:16]}",
        "async": None,
        "caller": None,
        "namespace": None,
        "status": status,
    }
