"""`/v1/messages`: Anthropic's API, which is translated into a chat completion as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import msgspec

from disagg.engines.emulated.answers import parsed_answer
from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.constraints import Constraint
from disagg.engines.emulated.fields import Fields, MalformedBodyError, problem
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.parsing import Parsed, StreamParts, call_id
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.engines.emulated.sequence import Sequence
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import DisaggError
from disagg.http.messages import Answer, error_object, json_answer

_encode = msgspec.json.Encoder().encode
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "kv_transfer_params", "cache_salt", "priority")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Messages(GeneratingApi):
    """Anthropic messages."""

    prefix = "chatcmpl"

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request."""
        _check(body, counting=False)
        return read_generation(chat_body(body), "chat", settings, tokenizer)

    def form(self, generation: Generation, identity: Identity, body: Mapping[str, Any], tokenizer: Tokenizer) -> Form:
        """Who writes the answer."""
        return MessagesForm(generation, identity)

    def refused(self, error: DisaggError) -> Answer:
        """Anthropic's shape, except for what does not even fit the schema."""
        if isinstance(error, MalformedBodyError):
            return json_answer(error.status, error_object(error))
        shown = {"type": error.kind, "message": str(error)}
        return json_answer(error.status, {"type": "error", "error": shown})


def count_tokens(body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer of `/v1/messages/count_tokens`.

    Raises:
        ClientError: If the request is not valid.
    """
    _check(body, counting=True)
    generation = read_generation({**chat_body(body), "max_tokens": 1}, "chat", settings, tokenizer)
    count = len(generation.prompts[0])
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def _check(body: Mapping[str, Any], *, counting: bool) -> None:
    fields = Fields(body)
    for name in ("model", "messages", *(() if counting else ("max_tokens",))):
        if body.get(name) is None:
            fields.problems.append(problem("missing", f"body.{name}", "Field required", dict(body)))
    limit = fields.integer("max_tokens")
    if limit is not None and limit <= 0:
        found = problem("value_error", "body.max_tokens", "Value error, max_tokens must be positive", limit)
        fields.problems.append(found | {"ctx": {"error": ValueError("max_tokens must be positive")}})
    fields.done()


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as a chat completion."""
    out: dict[str, Any] = {key: body[key] for key in _SAME if key in body}
    out["messages"] = _chat_messages(body)
    if "max_tokens" in body:
        out["max_tokens"] = out["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        out["stop"] = body["stop_sequences"]
    if body.get("stream"):
        out["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        out["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description"),
                    "parameters": tool.get("input_schema"),
                },
            }
            for tool in tools
            if isinstance(tool, dict)
        ]
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            kind = str(choice.get("type"))
            named = {"type": "function", "function": {"name": choice.get("name")}}
            out["tool_choice"] = named if kind == "tool" else _CHOICES.get(kind, kind)
        else:
            out["tool_choice"] = "auto"
    return out


def _chat_messages(body: Mapping[str, Any]) -> object:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return messages
    system = body.get("system")
    if isinstance(system, list):
        system = "".join(str(block.get("text", "")) for block in system if isinstance(block, dict))
    out: list[object] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            out += _turn(str(message.get("role")), message["content"])
        else:
            out.append(message)
    return out


def _turn(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """One message of blocks: its text, the calls that it made, and the results as messages of their own."""
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "tool_use"}:
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case {"type": "tool_result"}:
                content = block.get("content")
                if isinstance(content, list):
                    content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
                out.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""})
            case {"type": "thinking" | "redacted_thinking"}:
                continue
            case _:
                parts.append(block)
    if parts or calls:
        message: dict[str, Any] = {"role": role, "content": parts or None}
        if calls:
            message["tool_calls"] = calls
        out.append(message)
    return out


def _stop_reason(seq: Sequence, parsed: Parsed) -> tuple[str, str | None]:
    """Why it stopped, and at which string."""
    if seq.finish_reason == "length":
        return "max_tokens", None
    if parsed.tool is not None:
        return "tool_use", None
    if isinstance(seq.stop_reason, str):
        return "stop_sequence", seq.stop_reason
    return "end_turn", None


def _usage(seq: Sequence) -> dict[str, int]:
    return {
        "input_tokens": len(seq.prompt) - seq.cached_tokens,
        "output_tokens": len(seq.output),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": seq.cached_tokens,
    }


class MessagesForm:
    """Answers of `/v1/messages`."""

    def __init__(self, generation: Generation, identity: Identity) -> None:
        self._generation = generation
        self._identity = identity
        self._parts = StreamParts(generation.constraint if generation.constraint.parses else Constraint())
        self._shown = 0
        self._block: str | None = None
        self._blocks = 0

    def _counted(self, seq: Sequence) -> dict[str, int]:
        if not self._identity.details:
            return {"input_tokens": len(seq.prompt), "output_tokens": len(seq.output)}
        return _usage(seq)

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        seq = sequences[0]
        parsed = parsed_answer(seq, self._generation)
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning})
        if parsed.content or parsed.tool is None:
            content.append({"type": "text", "text": parsed.content})
        if parsed.tool is not None:
            arguments = json.loads(parsed.arguments) if seq.finish_reason == "stop" else {}
            content.append({"type": "tool_use", "id": call_id(), "name": parsed.tool, "input": arguments})
        reason, stop = _stop_reason(seq, parsed)
        out: dict[str, Any] = {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._identity.model,
            "stop_reason": reason,
        }
        if stop is not None:
            out["stop_sequence"] = stop
        out["usage"] = self._counted(seq)
        if seq.params_out is not None:
            out["kv_transfer_params"] = seq.params_out
        return _encode(out)

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """The message, still empty."""
        message: dict[str, Any] = {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._identity.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(sequences[0].prompt), "output_tokens": 0},
        }
        return _event("message_start", {"message": message})

    def delta(self, index: int, seq: Sequence) -> bytes:
        """Further text, thinking or arguments, each in a block of its own."""
        del index
        shown = seq.visible
        text = seq.text[self._shown : shown]
        self._shown = shown
        final = seq.finish_reason is not None
        if not self._generation.constraint.parses:
            return self._in_block("text", {"type": "text_delta", "text": text}) if text else b""
        out = b""
        for delta in self._parts.feed(text, final=final):
            if "reasoning" in delta:
                out += self._in_block("thinking", {"type": "thinking_delta", "thinking": delta["reasoning"]})
            elif "tool_calls" not in delta:
                out += self._in_block("text", {"type": "text_delta", "text": delta["content"]})
            elif "id" in delta["tool_calls"][0]:
                call = delta["tool_calls"][0]
                head = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
                out += self._open("tool_use", head)
            else:
                arguments = delta["tool_calls"][0]["function"]["arguments"]
                out += self._in_block("tool_use", {"type": "input_json_delta", "partial_json": arguments})
        return out

    def _in_block(self, kind: str, delta: dict[str, Any]) -> bytes:
        opened = b""
        if self._block != kind:
            opened = self._open(kind, {"type": kind, kind: ""})
        return opened + _event("content_block_delta", {"delta": delta, "index": self._blocks - 1})

    def _open(self, kind: str, head: dict[str, Any]) -> bytes:
        out = self._close_block()
        self._block = kind
        self._blocks += 1
        return out + _event("content_block_start", {"content_block": head, "index": self._blocks - 1})

    def _close_block(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        return _event("content_block_stop", {"index": self._blocks - 1})

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The end of the last block, why it ended, and what it cost."""
        seq = sequences[0]
        reason, stop = _stop_reason(seq, self._parts.parsed)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        out = self._close_block() + _event("message_delta", {"delta": delta, "usage": self._counted(seq)})
        return out + _event("message_stop", {})

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, which ends it."""
        return _event("error", {"error": {"type": "internal_error", "message": str(error)}})

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return Messages().refused(error)


def _event(kind: str, rest: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **rest}))
