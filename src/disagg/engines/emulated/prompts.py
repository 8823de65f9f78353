"""From messages or prompts to tokens: the chat template of the toy model, and the length check."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from disagg.engines.emulated.fields import problem, rejected, schema_error
from disagg.engines.emulated.model import IM_END, IM_START, VOCAB_SIZE, Tokenizer

MAX_TOKEN_CHARS = 81
"""Characters of the longest token, of a real vocabulary: the toy's own four would refuse most long texts here."""


def chat_tokens(body: Mapping[str, Any], tokenizer: Tokenizer, model: str) -> list[int]:
    """The rendered chat prompt of a model of this name.

    Everything that a template can show goes in: the tools in the order sent, names, tool calls.

    Raises:
        BadRequestError: If the messages do not have their shape, or hold what this engine cannot read.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise schema_error(problem("list_type", "body.messages", "Input should be a valid list", messages))
    if not messages:
        raise rejected("Cannot apply chat template to an empty conversation. Provide at least one message.")
    out: list[int] = []
    if body.get("tools") and body.get("tool_choice") != "none":
        out += _turn("system", json.dumps(body["tools"]), tokenizer)
    for index, message in enumerate(messages):
        out += _turn(*_role_and_text(message, index, model), tokenizer)
    if body.get("continue_final_message"):
        if body.get("add_generation_prompt", True):
            raise rejected(
                "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message "
                "when you want the model to continue the final message, and add_generation_prompt when you want to "
                "add a header that will prompt it to start a new assistant message instead."
            )
        return out[:-2]
    if body.get("add_generation_prompt", True):
        out += [IM_START, *tokenizer.encode("assistant\n")]
    return out


def _turn(role: str, text: str, tokenizer: Tokenizer) -> list[int]:
    return [IM_START, *tokenizer.encode(f"{role}\n"), *tokenizer.encode(text), IM_END, *tokenizer.encode("\n")]


def _role_and_text(message: object, index: int, model: str) -> tuple[str, str]:
    where = f"body.messages.{index}"
    if not isinstance(message, dict):
        raise schema_error(problem("dict_type", where, "Input should be a valid dictionary", message))
    role = message.get("role")
    if not isinstance(role, str):
        raise schema_error(problem("missing", f"{where}.role", "Field required", message))
    extra = "".join(
        f"\n{key}: {json.dumps(message[key])}" for key in ("name", "tool_calls", "tool_call_id") if key in message
    )
    return role, _content(message.get("content"), where, model) + extra


def _content(content: object, where: str, model: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise schema_error(problem("string_type", f"{where}.content", "Input should be a valid string", content))
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind.partition("_")[0] in {"image", "audio", "video", "input"}:
            raise rejected(f"{model} is not a multimodal model")
        else:
            raise schema_error(problem("literal_error", f"{where}.content", "Unknown part of a message", part))
    return "\n".join(texts)


def completion_prompts(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[tuple[list[int], str | None]]:
    """Each prompt's tokens, and its text if it came as text.

    Raises:
        BadRequestError: If there is no prompt, or it has none of the four accepted shapes.
    """
    prompt = body.get("prompt")
    if prompt is None or prompt == "":
        raise rejected("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise rejected("You must pass at least one prompt")
    if isinstance(prompt, str):
        return [(tokenizer.encode(prompt), prompt)]
    if isinstance(prompt, list):
        if all(isinstance(item, str) for item in prompt):
            return [(tokenizer.encode(item), item) for item in prompt]
        if all(isinstance(item, int) for item in prompt):
            return [(_ids(prompt), None)]
        if all(isinstance(item, list) and all(isinstance(token, int) for token in item) for item in prompt):
            return [(_ids(item), None) for item in prompt]
    raise schema_error(problem("string_type", "body.prompt", "Input should be a valid string", prompt))


def _ids(tokens: list[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token < 0:
            message = "Input should be greater than or equal to 0"
            found = problem("greater_than_equal", f"body.prompt.{index}", message, token)
            raise schema_error(found | {"ctx": {"ge": 0}})
        if token >= VOCAB_SIZE:
            raise rejected(f"Token id {token} is out of vocabulary")
    return list(tokens)


def given_tokens(params: Mapping[str, Any] | None) -> list[int] | None:
    """Tokens that the handoff parameters bring, so that nothing has to be rendered here.

    Raises:
        BadRequestError: If they are there and are no list of token ids.
    """
    tokens = params.get("prompt_token_ids") if params else None
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int and t >= 0 for t in tokens):
        raise rejected(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
            "kv_transfer_params.prompt_token_ids",
        )
    return _ids(tokens)


def check_text(text: str, limit: int) -> None:
    """Refuse a text that cannot fit the context, before it is tokenised.

    Raises:
        BadRequestError: If it has more characters than the context's tokens could have.
    """
    most = limit * MAX_TOKEN_CHARS
    if len(text) > most:
        raise rejected(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {most} characters, which is the upper bound for {limit} input tokens). "
            "Please reduce the length of the input prompt.",
            "input_text",
            len(text),
        )


def check_length(tokens: list[int], limit: int, *, from_text: bool) -> None:
    """Refuse a prompt that does not fit the context.

    A text is only tokenised up to the limit, so its exact length is not known and not told.

    Raises:
        BadRequestError: If it is empty or too long.
    """
    if not tokens:
        raise rejected("The decoder prompt cannot be empty")
    if len(tokens) <= limit:
        return
    count = limit + 1 if from_text else len(tokens)
    shown = f"at least {count}" if from_text else str(count)
    raise rejected(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {shown} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        count,
    )
