"""Answers in vLLM's JSON shapes and SSE framing, key by key."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from typing import Any

import msgspec

from disagg.engines.emulated.form import Identity
from disagg.engines.emulated.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.parsing import Parsed, StreamParts, call_id, parse
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.sequence import Sequence
from disagg.errors import DisaggError
from disagg.http.messages import Answer, error_object, json_answer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage(sequences: Items[Sequence], choices: int, *, details: bool, created: int | None = None) -> dict[str, Any]:
    """Usage over all choices; a prompt counts once, however many choices it has."""
    prompt = sum(len(seq.prompt) for seq in sequences[::choices])
    completion = sum(len(seq.output) for seq in sequences)
    cached = {
        "cached_tokens": sequences[-1].cached_tokens,
        "created_cache_tokens": created,
        "multimodal_tokens": None,
    }
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": cached if details else None,
        "completion_tokens_details": None,
    }


def full(generation: Generation, identity: Identity, sequences: Items[Sequence], tokenizer: Tokenizer) -> bytes:
    """A whole answer that is not streamed."""
    build = _chat_choice if generation.chat else _completion_choice
    choices = [build(generation, index, seq, tokenizer) for index, seq in enumerate(sequences)]
    out: dict[str, Any] = {
        "id": identity.id,
        "object": "chat.completion" if generation.chat else "text_completion",
        "created": identity.created,
        "model": identity.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": identity.fingerprint,
        "usage": usage(
            sequences,
            len(generation.samplings),
            details=identity.details,
            created=0 if generation.chat else None,
        ),
    }
    first = sequences[0]
    if generation.chat:
        out["prompt_logprobs"] = (
            None
            if generation.prompt_logprobs is None
            else prompt_logprobs(first, generation.prompt_logprobs, tokenizer)
        )
        out["prompt_token_ids"] = first.prompt if generation.return_token_ids else None
        out["prompt_text"] = None
    out |= {"kv_transfer_params": first.params_out, "ec_transfer_params": None, "metrics": None}
    return _encode(out)


def _chat_choice(generation: Generation, index: int, seq: Sequence, tokenizer: Tokenizer) -> dict[str, Any]:
    top = generation.logprobs
    echoed = generation.echoed[0] if generation.echoed else ""
    parsed = parsed_answer(seq, generation)
    return {
        "index": index,
        "message": _message(generation, parsed, echoed),
        "logprobs": None if top is None else chat_logprobs(seq, 0, len(seq.output), top, tokenizer),
        "finish_reason": finish_reason(seq, generation, parsed),
        "stop_reason": seq.stop_reason,
        "token_ids": seq.output if generation.return_token_ids else None,
        "routed_experts": None,
    }


def parsed_answer(seq: Sequence, generation: Generation) -> Parsed:
    """The parts of a whole answer."""
    constraint = generation.constraint
    if not constraint.parses:
        return Parsed(content=seq.text)
    return parse(seq.text, reasoning=constraint.reasons, tools=constraint.mode is not None, final=True)


def finish_reason(seq: Sequence, generation: Generation, parsed: Parsed) -> str | None:
    """Why a choice ended: a call that the model chose itself has a reason of its own, a named one has not."""
    if parsed.tool is not None and seq.finish_reason == "stop" and generation.constraint.mode != "named":
        return "tool_calls"
    return seq.finish_reason


def _message(generation: Generation, parsed: Parsed, echoed: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "role": generation.role,
        "content": echoed + parsed.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if parsed.tool is not None:
        function = {"name": parsed.tool, "arguments": parsed.arguments}
        out["tool_calls"] = [{"id": call_id(), "type": "function", "function": function}]
    out["reasoning"] = parsed.reasoning or None
    return out


def _completion_choice(generation: Generation, index: int, seq: Sequence, tokenizer: Tokenizer) -> dict[str, Any]:
    echoed = generation.echoed[index // len(generation.samplings)] if generation.echoed else ""
    text = echoed if generation.only_echo else echoed + seq.text
    top, asked = generation.logprobs, generation.prompt_logprobs
    return {
        "index": index,
        "text": text,
        "logprobs": None if top is None else completion_logprobs(seq, generation, tokenizer),
        "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason,
        "token_ids": seq.output if generation.return_token_ids else None,
        "prompt_logprobs": None if asked is None else prompt_logprobs(seq, asked, tokenizer),
        "prompt_token_ids": seq.prompt if generation.return_token_ids else None,
        "routed_experts": None,
    }


def error_event(error: DisaggError) -> bytes:
    """An error inside a stream, and the end of the stream."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n" + DONE


class OpenAiForm:
    """Chat and text completions."""

    def __init__(self, generation: Generation, identity: Identity, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._identity = identity
        self._tokenizer = tokenizer
        if not generation.stream:
            return
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        head = _encode({"id": identity.id, "object": kind, "created": identity.created, "model": identity.model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        count = len(generation.prompts) * len(generation.samplings)
        self._shown_text = [0] * count
        self._shown_tokens = [0] * count
        # What is neither text nor end of a chunk; only requests that ask for more need the slow way.
        self._plain = not (
            generation.logprobs is not None or generation.return_token_ids or generation.continuous_usage
        )
        constraint = generation.constraint
        self._parts = [StreamParts(constraint) for _ in range(count)] if constraint.parses else []

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        return full(self._generation, self._identity, sequences, self._tokenizer)

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, and the end of the stream."""
        return error_event(error)

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return json_answer(error.status, error_object(error))

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """The chunks that come before the first token: the role of each choice, in chat only."""
        generation = self._generation
        if not generation.chat:
            return b""
        out = b""
        prompt = sequences[0].prompt if generation.return_token_ids else None
        for index, seq in enumerate(sequences):
            delta = {"role": generation.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            out += self._chunk(choice, seq, {"prompt_token_ids": prompt, "prompt_text": None})
        if generation.echoed and generation.echoed[0]:
            for index, seq in enumerate(sequences):
                delta = {"content": generation.echoed[0]}
                out += self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, seq)
        return out

    def delta(self, index: int, seq: Sequence) -> bytes:
        """The next chunk of one choice: everything since the last one, and the end if it has ended."""
        shown = seq.visible
        text = seq.text[self._shown_text[index] : shown]
        first = self._shown_tokens[index] == 0
        begin, end = self._shown_tokens[index], len(seq.output)
        self._shown_text[index], self._shown_tokens[index] = shown, end
        if self._parts:
            return self._parsed_delta(index, seq, text, (begin, end))
        if self._generation.chat:
            return self._chat_delta(index, seq, text, (begin, end))
        return self._completion_delta(index, seq, text, (begin, end), first=first)

    def _chat_delta(self, index: int, seq: Sequence, text: str, span: tuple[int, int]) -> bytes:
        if self._plain and seq.finish_reason is None:
            return (
                b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
                % (
                    self._head,
                    index,
                    _encode(text),
                )
            )
        generation = self._generation
        top = generation.logprobs
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None if top is None else chat_logprobs(seq, *span, top, self._tokenizer),
            "finish_reason": seq.finish_reason,
        }
        if seq.finish_reason is not None:
            choice["stop_reason"] = seq.stop_reason
        choice["token_ids"] = seq.output[span[0] : span[1]] if generation.return_token_ids else None
        return self._chunk(choice, seq)

    def _parsed_delta(self, index: int, seq: Sequence, text: str, span: tuple[int, int]) -> bytes:
        """Chunks of an answer that is taken apart: none for a token that belongs to the form alone."""
        generation, parts = self._generation, self._parts[index]
        deltas = parts.feed(text, final=seq.finish_reason is not None)
        if seq.finish_reason is not None:
            deltas.append({})
        top = generation.logprobs
        out = b""
        for delta in deltas:
            last = delta is deltas[-1]
            choice: dict[str, Any] = {
                "index": index,
                "delta": delta,
                "logprobs": None if top is None or not last else chat_logprobs(seq, *span, top, self._tokenizer),
                "finish_reason": finish_reason(seq, generation, parts.parsed) if last else None,
            }
            if choice["finish_reason"] is not None:
                choice["stop_reason"] = seq.stop_reason
            choice["token_ids"] = seq.output[span[0] : span[1]] if last and generation.return_token_ids else None
            out += self._chunk(choice, seq)
        return out

    def _completion_delta(self, index: int, seq: Sequence, text: str, span: tuple[int, int], *, first: bool) -> bytes:
        generation = self._generation
        prompt = index // len(generation.samplings)
        if first and generation.echoed:
            text = generation.echoed[prompt] if generation.only_echo else generation.echoed[prompt] + text
        if self._plain and seq.finish_reason is None:
            return (
                b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n' % (self._head, index, _encode(text))
            )
        logprobs = None
        if generation.logprobs is not None:
            logprobs = completion_logprobs(seq, generation, self._tokenizer, span, with_prompt=first)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "prompt_token_ids": seq.prompt if first and generation.return_token_ids else None,
            "token_ids": seq.output[span[0] : span[1]] if generation.return_token_ids else None,
        }
        return self._chunk(choice, seq)

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The usage chunk, if asked for, and the end."""
        if not self._generation.include_usage:
            return DONE
        identity = self._identity
        counted = usage(sequences, len(self._generation.samplings), details=identity.details)
        kept = {key: value for key, value in counted.items() if value is not None}
        if identity.details:
            kept["prompt_tokens_details"] = {"cached_tokens": sequences[0].cached_tokens}
        return (
            self._head[:-1]
            + b'[],"usage":'
            + _encode(kept)
            + b',"system_fingerprint":'
            + _encode(identity.fingerprint)
            + b"}\n\n"
            + DONE
        )

    def _chunk(self, choice: dict[str, Any], seq: Sequence, extra: dict[str, Any] | None = None) -> bytes:
        generation = self._generation
        tail: dict[str, Any] = {}
        if generation.continuous_usage:
            prompt, output = len(seq.prompt), len(seq.output)
            if "role" in choice.get("delta", ()):
                output = 0
            tail["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
            if generation.chat:
                tail["usage"]["completion_tokens_details"] = None
        if not generation.include_usage and choice["finish_reason"] is not None:
            tail["system_fingerprint"] = self._identity.fingerprint
        tail |= extra or {}
        rest = b"," + _encode(tail)[1:] if tail else b"}"
        return self._head + _encode(choice) + b"]" + rest + b"\n\n"
