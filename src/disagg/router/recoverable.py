"""Which streams can go on elsewhere when their decode instance dies. Pure.

What goes on is a new request whose prompt is the old one and everything that was sent. So whatever an engine keeps
beside the tokens, and whatever it counts from the beginning of its output, makes the rest another one.
"""

from __future__ import annotations

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body

_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})
_VALUES = (
    ("prompt_logprobs", "prompt-logprobs"),
    ("prompt_embeds", "prompt-embeds"),
    ("truncate_prompt_tokens", "truncated-prompt"),
    # The engine holds text back that may become a stop string, so tokens and text do not end at the same place.
    ("stop", "stop-strings"),
    ("structured_outputs", "structured-output"),
    ("guided_json", "structured-output"),
    ("guided_regex", "structured-output"),
    ("guided_choice", "structured-output"),
    ("guided_grammar", "structured-output"),
    ("thinking_token_budget", "thinking-budget"),
)
# Counted over the output alone, of which a new request would see only its own part.
_PENALTIES = ("presence_penalty", "frequency_penalty")
_NOTHING = frozenset({b"null", b"[]", b'""', b"{}"})
_MEDIA = (b'"image', b'"video', b'"audio', b'"input_', b'"file')

_format = msgspec.json.Decoder(dict[str, msgspec.Raw])


def why_not(api: Api, body: Body) -> str | None:
    """Why a stream of this request cannot be recovered, as a short slug; None if it can."""
    if api not in _APIS:
        return "not-for-this-api"
    reason = bodies.several(api, body)
    if reason is not None:
        return reason
    if "echo" in body and bodies.is_true(body, "echo"):
        return "echo"
    for key, reason in _VALUES:
        if bytes(body.get(key, b"null")).strip() not in _NOTHING:
            return reason
    if any(key in body and bodies.number_at(body, key) != 0 for key in _PENALTIES):
        return "penalties"
    return _chat_reason(body) if api is Api.CHAT else _completion_reason(body)


def _chat_reason(body: Body) -> str | None:
    form = body.get("response_format")
    if form is not None and bytes(form).strip() not in _NOTHING and not _is_text(form):
        return "structured-output"
    if bytes(body.get("tools", b"null")).strip() not in _NOTHING:
        # The parser of tool calls would begin in the middle of one.
        return "tools"
    if not bodies.is_null(body, "include_reasoning") and not bodies.is_true(body, "include_reasoning"):
        # Nothing tells the tokens that the engine hides.
        return "hidden-reasoning"
    messages = bytes(body.get("messages", b""))
    return "media" if any(mark in messages for mark in _MEDIA) else None


def _completion_reason(body: Body) -> str | None:
    prompt = body.get("prompt")
    if prompt is not None and bodies.holds_several(prompt):
        return "prompt-list"
    form = body.get("response_format")
    if form is not None and bytes(form).strip() not in _NOTHING and not _is_text(form):
        return "structured-output"
    # Offsets into the text would start at 0 again.
    return None if bodies.is_null(body, "logprobs") else "logprobs"


def _is_text(form: msgspec.Raw) -> bool:
    try:
        return bytes(_format.decode(form).get("type", b"")) == b'"text"'
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
