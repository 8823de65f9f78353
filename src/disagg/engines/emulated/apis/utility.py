"""Endpoints that generate nothing: tokens from text and back, prompts as an engine would see them, token counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.fields import Fields, problem, rejected, schema_error
from disagg.engines.emulated.model import VOCAB_SIZE, Tokenizer
from disagg.engines.emulated.prompts import chat_tokens
from disagg.engines.emulated.requests import Generation, choose_model
from disagg.engines.emulated.sequence import Sampling
from disagg.engines.emulated.settings import EngineSettings


def tokenize(body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """`/tokenize`: a text, or messages.

    Raises:
        ClientError: If it is neither, or the model is unknown.
    """
    prompt, chat = body.get("prompt"), body.get("messages")
    if prompt is None and chat is None:
        missing = ("prompt", "messages")
        raise schema_error(*(problem("missing", f"body.{name}", "Field required", dict(body)) for name in missing))
    if prompt is not None and not isinstance(prompt, str):
        raise schema_error(problem("string_type", "body.prompt", "Input should be a valid string", prompt))
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise rejected("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    fields = Fields(body)
    wants_strings = fields.flag("return_token_strs")
    fields.done()
    choose_model(Generation(chat=False), fields.text("model"), settings)
    if prompt is None:
        adjusted = {**body, "add_generation_prompt": False} if body.get("continue_final_message") else body
        tokens = chat_tokens(adjusted, tokenizer, settings.served_model_names[0])
    else:
        tokens = tokenizer.encode(prompt)
    strings = [tokenizer.token_text(token, special=True) for token in tokens] if wants_strings else None
    return {
        "count": len(tokens),
        "max_model_len": settings.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """`/detokenize`: text of token ids; an id outside the vocabulary has none.

    Raises:
        ClientError: If there are none, or the model is unknown.
    """
    tokens = body.get("tokens")
    if tokens is None:
        raise schema_error(problem("missing", "body.tokens", "Field required", dict(body)))
    if not isinstance(tokens, list):
        raise schema_error(problem("list_type", "body.tokens", "Input should be a valid list", tokens))
    for index, token in enumerate(tokens):
        where = f"body.tokens.{index}"
        if not isinstance(token, int) or isinstance(token, bool):
            raise schema_error(problem("int_type", where, "Input should be a valid integer", token))
        if token < 0:
            message = "Input should be greater than or equal to 0"
            raise schema_error(problem("greater_than_equal", where, message, token) | {"ctx": {"ge": 0}})
    choose_model(Generation(chat=False), Fields(body).text("model"), settings)
    return {"prompt": tokenizer.decode(token for token in tokens if token < VOCAB_SIZE)}


def render(
    api: GeneratingApi, given: str | None, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer
) -> object:
    """A request of another API as token ids, ready for `/inference/v1/generate`.

    Raises:
        ClientError: If that API would refuse it.
    """
    generation = api.read(body, settings, tokenizer)
    identity = api.identify(given, body, generation.model, "", details=False)
    stop = body.get("stop") or body.get("stop_sequences") or []
    temperature = float(body.get("temperature", 1.0))
    shared: dict[str, Any] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": temperature,
    }
    if temperature:
        shared |= {"top_p": float(body.get("top_p", 1.0)), "min_p": float(body.get("min_p", 0.0))}
    shared |= {
        "stop": [stop] if isinstance(stop, str) else stop,
        "stop_token_ids": body.get("stop_token_ids") or [],
        **_limits(generation.samplings[0]),
        "output_kind": 2,
        "skip_clone": True,
    }
    if api.prefix == "resp":
        shared["extra_args"] = {}
    shared |= {"bad_words": [], "skip_reading_prefix_cache": False}
    out = []
    for number, tokens in enumerate(generation.prompts):
        name = f"{identity.id}-{number}" if identity.numbered else identity.id
        out.append(_rendered(name, tokens, shared, generation, body))
    return out if identity.numbered else out[0]


def _limits(sampling: Sampling) -> dict[str, Any]:
    out: dict[str, Any] = {"max_tokens": sampling.max_tokens}
    if sampling.min_tokens:
        out["min_tokens"] = sampling.min_tokens
    if sampling.ignore_eos:
        out["ignore_eos"] = True
    return out


def _rendered(
    name: str, tokens: list[int], sampling: dict[str, Any], generation: Generation, body: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "request_id": name,
        "token_ids": tokens,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling,
        "model": generation.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": body.get("return_token_ids"),
        "output_mode": "tokens",
        "stream": generation.stream,
        "stream_options": body.get("stream_options"),
        "cache_salt": body.get("cache_salt"),
        "priority": generation.priority,
        "kv_transfer_params": generation.kv_params,
        "ec_transfer_params": None,
    }
