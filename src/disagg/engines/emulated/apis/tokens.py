"""`/inference/v1/generate`: token ids in, token ids (or text) out."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import msgspec

from disagg.engines.emulated.answers import DONE, error_event, usage
from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.fields import Fields, problem, rejected, schema_error
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.logprobs import prompt_logprobs, ranked
from disagg.engines.emulated.model import VOCAB_SIZE, Tokenizer
from disagg.engines.emulated.requests import Generation, choose_model, read_generation
from disagg.engines.emulated.sequence import Sequence
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import DisaggError
from disagg.http.messages import Answer, error_object, json_answer

_encode = msgspec.json.Encoder().encode
_OUTER = ("kv_transfer_params", "cache_salt", "stream", "stream_options", "priority", "model", "return_token_ids")


class Generate(GeneratingApi):
    """Token-in, token-out generation."""

    prefix = "generate-tokens"

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request; its sampling parameters lie in an object of their own."""
        tokens = _token_ids(body)
        inner = body.get("sampling_params")
        fields = Fields(body)
        if inner is None:
            fields.problems.append(problem("missing", "body.sampling_params", "Field required", dict(body)))
        elif not isinstance(inner, dict):
            fields.problems.append(problem("dict_type", "body.sampling_params", "Not an object", inner))
        if body.get("output_mode") not in {None, "tokens", "text"}:
            message = "Input should be 'tokens' or 'text'"
            fields.problems.append(problem("literal_error", "body.output_mode", message, body["output_mode"]))
        fields.done()
        choose_model(Generation(chat=False), fields.text("model"), settings)
        for token in tokens:
            if token >= VOCAB_SIZE:
                raise rejected(f"Token id {token} is out of vocabulary")
        limit = settings.max_model_len
        if len(tokens) > limit:
            raise rejected(
                f"The decoder prompt (length {len(tokens)}) is longer than the maximum model length of {limit}. Make "
                "sure that `max_model_len` is no smaller than the number of text tokens."
            )
        flat = {**(inner or {}), **{key: body[key] for key in _OUTER if key in body}, "prompt": tokens}
        # Without a limit of its own a request may fill the context.
        flat.setdefault("max_tokens", max(1, limit - len(tokens)))
        return read_generation(flat, "completion", settings, tokenizer)

    def form(self, generation: Generation, identity: Identity, body: Mapping[str, Any], tokenizer: Tokenizer) -> Form:
        """Who writes the answer."""
        return TokensForm(generation, identity, tokenizer, text=body.get("output_mode") == "text")


def _token_ids(body: Mapping[str, Any]) -> list[int]:
    tokens = body.get("token_ids")
    where = "body.token_ids"
    if tokens is None:
        raise schema_error(problem("missing", where, "Field required", dict(body)))
    if not isinstance(tokens, list):
        raise schema_error(problem("list_type", where, "Input should be a valid list", tokens))
    if not tokens:
        found = problem("too_short", where, "List should have at least 1 item after validation, not 0", tokens)
        raise schema_error(found | {"ctx": {"field_type": "List", "min_length": 1, "actual_length": 0}})
    for index, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool):
            raise schema_error(problem("int_type", f"{where}.{index}", "Input should be a valid integer", token))
        if token < 0:
            message = "Input should be greater than or equal to 0"
            raise schema_error(problem("greater_than_equal", f"{where}.{index}", message, token) | {"ctx": {"ge": 0}})
    return tokens


class TokensForm:
    """Answers of `/inference/v1/generate`."""

    def __init__(self, generation: Generation, identity: Identity, tokenizer: Tokenizer, *, text: bool) -> None:
        self._generation = generation
        self._identity = identity
        self._tokenizer = tokenizer
        self._text = text
        self._shown = [(0, 0)] * len(generation.samplings)
        self._mode = "text" if text else "tokens"

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        generation, identity, first = self._generation, self._identity, sequences[0]
        asked = generation.prompt_logprobs
        return _encode(
            {
                "request_id": identity.id,
                "model": identity.model,
                "created": identity.created,
                "usage": usage(sequences, len(generation.samplings), details=identity.details),
                "prompt_logprobs": None if asked is None else prompt_logprobs(first, asked, self._tokenizer),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": first.prompt if generation.return_token_ids else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": first.params_out,
                "ec_transfer_params": None,
                "output_mode": self._mode,
                "choices": [self._choice(index, seq, 0, 0) for index, seq in enumerate(sequences)],
            }
        )

    def _choice(self, index: int, seq: Sequence, tokens_from: int, text_from: int) -> dict[str, Any]:
        ended = seq.finish_reason is not None
        versions = [{"version": "default", "start": 0, "end": len(seq.output)}] if ended else None
        out: dict[str, Any] = {
            "index": index,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "token_ids": seq.output[tokens_from:],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": versions,
        }
        if self._text:
            out["text"] = seq.text[text_from : seq.visible]
        out["logprobs"] = self._logprobs(seq, tokens_from)
        return out

    def _logprobs(self, seq: Sequence, begin: int) -> dict[str, Any] | None:
        top = self._generation.logprobs
        if top is None:
            return None
        content = []
        for token, context in zip(seq.output[begin:], seq.contexts[begin:], strict=True):
            rows = ranked(context, token, max(1, top))
            entries = [
                {"token_id": other, "logprob": value, "rank": rank} for rank, (other, value) in enumerate(rows, 1)
            ]
            content.append({**entries[0], "top_logprobs": entries[:top]})
        return {"content": content}

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """Nothing comes before the first token."""
        del sequences
        return b""

    def delta(self, index: int, seq: Sequence) -> bytes:
        """The tokens since the last event."""
        tokens, text = self._shown[index]
        self._shown[index] = (len(seq.output), seq.visible)
        choice = self._choice(index, seq, tokens, text)
        counted = None
        if self._generation.continuous_usage:
            prompt, output = len(seq.prompt), len(seq.output)
            counted = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
        return self._event({"usage": counted, "output_mode": self._mode, "choices": [choice]})

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """The usage, if asked for, and the end."""
        if not self._generation.include_usage:
            return DONE
        counted = usage(sequences, len(self._generation.samplings), details=False)
        kept = {key: value for key, value in counted.items() if value is not None}
        if self._identity.details:
            kept["prompt_tokens_details"] = {"cached_tokens": sequences[0].cached_tokens}
        return self._event({"usage": kept, "output_mode": self._mode, "choices": []}) + DONE

    def _event(self, rest: dict[str, Any]) -> bytes:
        return b"data: " + _encode({"request_id": self._identity.id, **rest}) + b"\n\n"

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, and the end of the stream."""
        return error_event(error)

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        return json_answer(error.status, error_object(error))
