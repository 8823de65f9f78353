"""SGLang's API: chat and text completions with its fields, and `/generate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec

from disagg.engines.emulated.answers import DONE, finish_reason, parsed_answer
from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.fields import rejected
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.logprobs import chat_logprobs, completion_logprobs
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.parsing import StreamParts, call_id
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.engines.emulated.sequence import Sequence
from disagg.engines.emulated.settings import EngineSettings, Role
from disagg.errors import DisaggError
from disagg.http.messages import Answer, json_answer

_encode = msgspec.json.Encoder().encode
_TYING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_RENAMED = {"max_new_tokens": "max_tokens"}


class SglangApi(GeneratingApi):
    """One endpoint of SGLang's.

    Args:
        kind: Which one.
    """

    prefix = "sglang"

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request. What prefill samples is one token, whatever the limit; decode has the whole limit."""
        if settings.role in {Role.PRODUCER, Role.CONSUMER} and body.get("bootstrap_room") is None:
            raise rejected("Disaggregated request received without bootstrap room id.")
        flat = dict(body)
        if self._kind == "generate":
            flat = _flattened(body)
        params = {key: body[key] for key in _TYING if key in body}
        flat["kv_transfer_params"] = params or None
        generation = read_generation(flat, "chat" if self._kind == "chat" else "completion", settings, tokenizer)
        if settings.role is Role.PRODUCER:
            generation.samplings = [replace(s, max_tokens=1, min_tokens=0) for s in generation.samplings]
        return generation

    def identify(
        self, given: str | None, body: Mapping[str, Any], model: str, fingerprint: str, *, details: bool
    ) -> Identity:
        """The body's `rid`, and nothing else, names a request."""
        name = str(body.get("rid") or uuid4().hex)
        return Identity(name, name, int(time.time()), model, fingerprint, details)

    def form(self, generation: Generation, identity: Identity, body: Mapping[str, Any], tokenizer: Tokenizer) -> Form:
        """Who writes the answer."""
        if self._kind == "generate":
            return GenerateForm(generation, identity, several=isinstance(body.get("text"), list))
        return SglangForm(generation, identity, tokenizer)

    def refused(self, error: DisaggError) -> Answer:
        """SGLang's shape of an error."""
        return _refused(error)


def _refused(error: DisaggError) -> Answer:
    body = {
        "object": "error",
        "message": str(error),
        "type": "BadRequestError" if error.status == 400 else error.kind,
        "param": None,
        "code": error.status,
    }
    return json_answer(error.status, body)


def _failed(error: DisaggError) -> bytes:
    return b"data: %b\n\n%b" % (
        _encode({"error": {"message": str(error), "type": error.kind, "code": error.status}}),
        DONE,
    )


def _flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """`/generate` as a text completion."""
    sampling = body.get("sampling_params") or {}
    flat = {_RENAMED.get(key, key): value for key, value in sampling.items()}
    flat.setdefault("max_tokens", 128)
    flat["prompt"] = body["input_ids"] if body.get("input_ids") is not None else body.get("text")
    flat["stream"] = bool(body.get("stream"))
    if body.get("return_logprob"):
        flat["logprobs"] = body.get("top_logprobs_num", 0)
    return flat


class GenerateForm:
    """Answers of `/generate`: text so far, and what is known about the request."""

    def __init__(self, generation: Generation, identity: Identity, *, several: bool) -> None:
        self._generation = generation
        self._identity = identity
        self._several = several

    def _one(self, seq: Sequence) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if seq.finish_reason == "length":
            reason = {"type": "length", "length": len(seq.output)}
        elif seq.finish_reason is not None:
            reason = {"type": seq.finish_reason, "matched": seq.stop_reason}
        return {
            "text": seq.text[: seq.visible],
            "output_ids": seq.output,
            "meta_info": {
                "id": self._identity.id,
                "finish_reason": reason,
                "prompt_tokens": len(seq.prompt),
                "weight_version": "default",
                "completion_tokens": len(seq.output),
                "cached_tokens": seq.cached_tokens,
            },
        }

    def full(self, sequences: Items[Sequence]) -> bytes:
        """One object, or a list where there are several prompts."""
        answers = [self._one(seq) for seq in sequences]
        return _encode(answers if self._several or len(answers) > 1 else answers[0])

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """Nothing comes before the first token."""
        del sequences
        return b""

    def delta(self, index: int, seq: Sequence) -> bytes:
        """The whole text so far."""
        event = self._one(seq)
        if self._several:
            event["index"] = index
        return b"data: " + _encode(event) + b"\n\n"

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The end."""
        del sequences
        return DONE

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, and the end of the stream."""
        return _failed(error)

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return _refused(error)


class SglangForm:
    """Chat and text completions in SGLang's fields."""

    def __init__(self, generation: Generation, identity: Identity, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._identity = identity
        self._tokenizer = tokenizer
        count = len(generation.prompts) * len(generation.samplings)
        self._shown = [(0, 0)] * count
        self._parts = [StreamParts(generation.constraint) for _ in range(count)]

    def _head(self, kind: str) -> dict[str, Any]:
        identity = self._identity
        return {"id": identity.id, "object": kind, "created": identity.created, "model": identity.model}

    def _usage(self, sequences: Items[Sequence]) -> dict[str, Any]:
        prompt = sum(len(seq.prompt) for seq in sequences[:: len(self._generation.samplings)])
        completion = sum(len(seq.output) for seq in sequences)
        cached = {"cached_tokens": sequences[0].cached_tokens} if self._identity.details else None
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": cached,
            "reasoning_tokens": 0,
        }

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        chat = self._generation.chat
        out = self._head("chat.completion" if chat else "text_completion")
        out["choices"] = [self._choice(index, seq) for index, seq in enumerate(sequences)]
        out["usage"] = self._usage(sequences)
        out["metadata"] = {"weight_version": "default"}
        return _encode(out)

    def _choice(self, index: int, seq: Sequence) -> dict[str, Any]:
        generation, parsed = self._generation, parsed_answer(seq, self._generation)
        out: dict[str, Any] = {"index": index}
        if generation.chat:
            calls = None
            if parsed.tool is not None:
                function = {"name": parsed.tool, "arguments": parsed.arguments}
                calls = [{"id": call_id(), "index": 0, "type": "function", "function": function}]
            out["message"] = {
                "role": "assistant",
                "content": parsed.content,
                "reasoning_content": parsed.reasoning or None,
                "tool_calls": calls,
            }
        else:
            out["text"] = seq.text
        out["logprobs"] = self._logprobs(seq, (0, len(seq.output)))
        out["finish_reason"] = finish_reason(seq, generation, parsed)
        out["matched_stop"] = seq.stop_reason
        return out

    def _logprobs(self, seq: Sequence, span: tuple[int, int]) -> dict[str, Any] | None:
        generation = self._generation
        if generation.logprobs is None:
            return None
        if generation.chat:
            return chat_logprobs(seq, *span, generation.logprobs, self._tokenizer)
        return completion_logprobs(seq, generation, self._tokenizer, span, with_prompt=span[0] == 0)

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """The role of each choice, in chat only."""
        if not self._generation.chat:
            return b""
        return b"".join(self._chunk(index, _delta("assistant", ""), None) for index in range(len(sequences)))

    def delta(self, index: int, seq: Sequence) -> bytes:
        """The text since the last event, and the end in an event of its own."""
        text_from, tokens_from = self._shown[index]
        text, ended = seq.text[text_from : seq.visible], seq.finish_reason is not None
        self._shown[index] = (seq.visible, len(seq.output))
        logprobs = self._logprobs(seq, (tokens_from, len(seq.output)))
        generation, out = self._generation, b""
        if not generation.chat:
            return self._chunk(index, text, logprobs, seq)
        if generation.constraint.parses:
            for part in self._parts[index].feed(text, final=ended):
                out += self._chunk(index, _part(part), logprobs)
        elif text or not ended:
            out += self._chunk(index, _delta(None, text), logprobs)
        return out + self._chunk(index, _delta(None, None), None, seq) if ended else out

    def _chunk(
        self, index: int, delta: object, logprobs: dict[str, Any] | None, seq: Sequence | None = None
    ) -> bytes:
        chat = self._generation.chat
        reason = None if seq is None else finish_reason(seq, self._generation, self._parts[index].parsed)
        choice = {
            "index": index,
            "delta" if chat else "text": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            "matched_stop": None if seq is None or reason is None else seq.stop_reason,
        }
        out = self._head("chat.completion.chunk" if chat else "text_completion")
        return b"data: " + _encode({**out, "choices": [choice], "usage": None}) + b"\n\n"

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The usage, if asked for, and the end."""
        if not self._generation.include_usage:
            return DONE
        out = self._head("chat.completion.chunk" if self._generation.chat else "text_completion")
        return b"data: " + _encode({**out, "choices": [], "usage": self._usage(sequences)}) + b"\n\n" + DONE

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, and the end of the stream."""
        return _failed(error)

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return _refused(error)


def _delta(role: str | None, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content, "reasoning_content": None, "tool_calls": None}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    out = _delta(None, part.get("content"))
    return out | {"reasoning_content": part.get("reasoning"), "tool_calls": part.get("tool_calls")}
