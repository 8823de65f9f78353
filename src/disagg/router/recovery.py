"""A stream whose decode instance died goes on elsewhere, without a lost or a doubled token.

::

    stream:   decode's events pass; the ids of their tokens are noted, and hidden unless the client asked for them
    D dies:   prompt ids + ids of tokens whose text the client has -> prefill leg -> decode leg on another pair
    goes on:  each further event becomes one of the first stream: its id and time, no second role, its usage

Tokens whose text the engine still held back, such as the first half of a character, are generated again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.router.framing import DONE
from disagg.router.recoverable import why_not
from disagg.router.sink import StreamFilter

_TRUE = msgspec.Raw(b"true")
# A quote inside a JSON string has a backslash before it, so these match keys only.
_IDS = re.compile(rb'"token_ids": ?\[([0-9, ]*)\]')
_PROMPT_IDS = re.compile(rb'"prompt_token_ids": ?\[([0-9, ]*)\]')
_NO_TEXT = re.compile(rb'"(?:content|text)": ?(?:""|null)|"delta": ?\{\}')
_EMPTY = re.compile(rb'"delta": ?\{\}')
_REASONING = re.compile(rb'"reasoning(?:_content)?": ?"[^"]')
_BARE = re.compile(rb'"finish_reason": ?null')
_FINISHED = re.compile(rb'"finish_reason": ?"')
_SAME = ("id", "created", "model", "system_fingerprint")
_COMPLETION_DEFAULT = 16
"""Tokens of a completion that names no limit."""
_CAPS = {Api.CHAT: ("max_completion_tokens", "max_tokens"), Api.COMPLETIONS: ("max_tokens",)}

_options = msgspec.json.Decoder(dict[str, Any])
_head = msgspec.json.Decoder(dict[str, Any])


class Recovery:
    """What one stream has shown so far. As a filter it takes whole events and returns what the client gets of them.

    Args:
        api: What the client called.
        body: Its request.
        can_continue: The engines take a prompt of token ids for this API on both legs.

    Attributes:
        refusal: Why this stream cannot be recovered; None if it can.
    """

    def __init__(self, api: Api, body: Body, *, can_continue: bool) -> None:
        self._api = api
        self._body = body
        self._shows_ids = "return_token_ids" in body and bodies.is_true(body, "return_token_ids")
        self.refusal = why_not(api, body) if can_continue else "engine-takes-no-ids"
        self._prompt: list[int] = []
        self._sent: list[int] = []
        self._held: list[int] = []
        self._first = b""
        self._finished = False
        self._billed = False
        self._resumed_at: int | None = None

    def leg_body(self) -> Body:
        """The client's body, with the ids of its tokens asked for."""
        return {**self._body, "return_token_ids": _TRUE}

    def behind(self, other: StreamFilter | None) -> StreamFilter:
        """This after another filter."""
        if other is None:
            return self
        return lambda data: self(other(data))

    def __call__(self, data: bytes) -> bytes:
        """Note what passes, and make it the client's."""
        events = data.split(b"\n\n")
        for event in events:
            self._note(event)
        if self._resumed_at is not None:
            return b"".join(self._continued(event) for event in events if event)
        if self._shows_ids:
            return data
        if _EMPTY.search(data):
            # An engine whose parser keeps words back sends these only because ids were asked for.
            data = b"".join(event + b"\n\n" for event in events if event and not _says_nothing(event))
        return _PROMPT_IDS.sub(b'"prompt_token_ids":null', _IDS.sub(b'"token_ids":null', data))

    def _note(self, event: bytes) -> None:
        if not self._first and event.startswith(b"data: {"):
            self._first = event
            found = _PROMPT_IDS.search(event)
            self._prompt = _numbers(found[1]) if found is not None else []
        found = _IDS.search(event)
        if found is not None:
            self._held += _numbers(found[1])
            if self._shows_ids or not _NO_TEXT.search(event):
                self._sent += self._held
                self._held = []
        if _FINISHED.search(event):
            self._finished = True
            # What follows the last token is the bill, if it was asked for.
            return
        if self._finished and b'"usage"' in event:
            self._billed = True
        if self.refusal is None and _REASONING.search(event):
            # The parser of reasoning would begin in the middle of it.
            self.refusal = "reasoning"

    # Going on.

    @property
    def obstacle(self) -> str | None:
        """Why it cannot go on from here; None if it can."""
        if self.refusal is not None:
            return self.refusal
        return None if self._prompt else "no-token-ids"

    @property
    def complete(self) -> bool:
        """Whether all of its tokens have been sent, and only the end is missing."""
        left = self._tokens_left()
        return self._finished or (left is not None and left <= 0)

    def resume(self) -> tuple[Body, list[int]]:
        """The request for what is missing. From now on events are rewritten.

        Returns:
            Its body, and the ids of its prompt where the API has no field of its own for them.
        """
        self._held = []
        self._resumed_at = len(self._sent)
        body = self.leg_body()
        ids = [*self._prompt, *self._sent]
        left = self._tokens_left()
        if left is not None:
            for cap in _CAPS[self._api]:
                if cap in body or self._api is Api.COMPLETIONS:
                    body[cap] = _raw(left)
        if "min_tokens" in body:
            body["min_tokens"] = _raw(max(0, int(bodies.number_at(body, "min_tokens")) - len(self._sent)))
        if self._api is Api.COMPLETIONS:
            body["prompt"] = _raw(ids)
            return body, []
        return body, ids

    def ending(self) -> bytes:
        """What the client still has to be sent of a complete stream."""
        head = self._head()
        events = []
        if not self._finished:
            part: dict[str, Any] = {"text": ""} if self._api is Api.COMPLETIONS else {"delta": {}}
            choice = {"index": 0, **part, "logprobs": None, "finish_reason": "length"}
            events.append({**head, "choices": [choice]})
        if self._wants_usage() and not self._billed:
            count = len(self._sent) + len(self._held)
            usage = {"prompt_tokens": len(self._prompt), "completion_tokens": count}
            usage["total_tokens"] = sum(usage.values())
            events.append({**head, "choices": [], "usage": usage})
        return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + DONE

    def _continued(self, event: bytes) -> bytes:
        """An event of a later stream as one of the first."""
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        chunk = _head.decode(event[6:])
        head = self._head()
        chunk |= {key: head[key] for key in _SAME if key in head and key in chunk}
        if chunk.get("prompt_token_ids") is not None:
            chunk["prompt_token_ids"] = None
        usage = chunk.get("usage")
        if usage is not None:
            self._bill(usage)
        choices = chunk.get("choices") or ()
        for choice in choices:
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = None
            if not self._shows_ids and "token_ids" in choice:
                choice["token_ids"] = None
            delta = choice.get("delta")
            if delta is not None and (delta.pop("role", None) is not None or not delta):
                empty = not any(delta.values()) and choice.get("finish_reason") is None
                if empty and not choice.get("token_ids") and not choice.get("logprobs"):
                    # It only opens the answer, which is open, or has brought ids.
                    return b""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _bill(self, usage: dict[str, Any]) -> None:
        """One bill for all parts: what was sent before is output, not prompt."""
        before = self._resumed_at or 0
        usage["prompt_tokens"] = len(self._prompt)
        usage["completion_tokens"] = usage.get("completion_tokens", 0) + before
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        # The later prefill finds what the earlier one computed, which is no saving of the client's.
        if usage.get("prompt_tokens_details") is not None:
            usage["prompt_tokens_details"] = None

    def _tokens_left(self) -> int | None:
        for cap in _CAPS[self._api]:
            if not bodies.is_null(self._body, cap):
                return int(bodies.number_at(self._body, cap)) - len(self._sent)
        return _COMPLETION_DEFAULT - len(self._sent) if self._api is Api.COMPLETIONS else None

    def _head(self) -> dict[str, Any]:
        first: dict[str, Any] = _head.decode(self._first[6:])
        return {key: first[key] for key in ("id", "object", *_SAME[1:]) if key in first}

    def _wants_usage(self) -> bool:
        raw = self._body.get("stream_options")
        try:
            options = _options.decode(raw) if raw is not None else {}
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False  # the engine would have refused it
        return options.get("include_usage") is True


def _says_nothing(event: bytes) -> bool:
    return _EMPTY.search(event) is not None and _BARE.search(event) is not None and b'"logprobs":{' not in event


def with_prompt_ids(leg: bytes, ids: Sequence[int]) -> bytes:
    """A chat leg whose prompt is these token ids: the engine then renders no template."""
    body = msgspec.json.decode(leg, type=dict[str, msgspec.Raw])
    raw = body.get("kv_transfer_params", msgspec.Raw(b"null"))
    params = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    params["prompt_token_ids"] = _raw(ids)
    body["kv_transfer_params"] = _raw(params)
    return msgspec.json.encode(body)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _numbers(text: bytes) -> list[int]:
    return [int(word) for word in text.split(b",")] if text.strip() else []
