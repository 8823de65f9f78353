"""The prompt in a request's body, as bytes whose beginning is the beginning of the prompt.

The bytes are those that the client wrote. A client that writes the same conversation in the same way, longer with
each turn, sends bytes that begin the same; nothing has to be parsed for that.
"""

from __future__ import annotations

from array import array

import msgspec

from disagg.engines.base import Body

# In the order in which chat templates show them.
_PARTS = ("tools", "system", "instructions", "messages", "prompt", "input", "token_ids")
# What makes other KV, or other tokens, of the same text.
_SEEDS = ("model", "cache_salt", "chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs")
_CLOSING = b'"]} \t\r\n'
_ids = msgspec.json.Decoder(list[int])
_one_list = msgspec.json.Decoder(tuple[list[int]])


def prompt_text(body: Body) -> bytes:
    """What the prompt is made of; empty if the body has none of the known keys."""
    parts = [bytes(body[key]) for key in _PARTS if key in body]
    # Without the closing brackets, the next turn of a conversation begins with all of this one.
    return (parts[0] if len(parts) == 1 else b"\0".join(parts)).rstrip(_CLOSING) if parts else b""


def prompt_seed(body: Body) -> bytes:
    """What else decides about the KV of the prompt's text."""
    return b"\0".join([b"%b=%b" % (key.encode(), bytes(body[key])) for key in _SEEDS if key in body])


def prompt_ids(body: Body) -> array[int] | None:
    """The prompt's token ids, if the client sent ids, of one prompt."""
    raw = body.get("token_ids") or body.get("prompt")
    if raw is None or bytes(raw).lstrip()[:1] != b"[":
        return None
    try:
        return array("I", _ids.decode(raw))
    except (msgspec.DecodeError, OverflowError, RecursionError):
        pass
    try:
        return array("I", _one_list.decode(raw)[0])
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return None
