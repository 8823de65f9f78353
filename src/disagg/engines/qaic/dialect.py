"""The content-keyed handoff of Cloud AI: prefill and decode meet in a store under the hash of the prompt's tokens.

No parameters travel through the router: the handle is empty. A decode binary computes no prompts, so what cannot be
handed over is refused. Prefill has to finish before decode starts: decode asks the store five times within a quarter
of a second and then fails the request.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Dialect, Handle, Transfer
from disagg.errors import HandoffError

_NOTHING = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    # Any other reason means that prefill did not compute the whole prompt, or did not store it.
    finish_reason: Literal["length", "stop", "tool_calls"]


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Answer(msgspec.Struct):
    usage: _Usage
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


_answer = msgspec.json.Decoder(_Answer)


class ContentDialect(Dialect):
    """Serial legs tied together by the prompt itself (`QaicConnector`)."""

    name = "content-keyed"
    internal_keys = bodies.INTERNAL_KEYS
    can_decode_alone = False

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request cannot be handed off; see `disagg.engines.base.Dialect`.

        A list of different prompts can: each is stored under its own hash.
        """
        del api
        for key, reason in (("n", "n-greater-1"), ("best_of", "best-of-greater-1")):
            # Decode removes what it loads, so a second sequence with the same prompt would find nothing.
            if bodies.is_more_than_one(body, key):
                return reason
        for key, reason in (("use_beam_search", "beam-search"), ("echo", "echo")):
            if bodies.is_true(body, key):
                return reason
        for key, reason in (("prompt_logprobs", "prompt-logprobs"), ("prompt_embeds", "prompt-embeds")):
            if not bodies.is_null(body, key):
                return reason
        return None if bodies.is_null(body, "truncate_prompt_tokens") else "truncated-prompt"

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The client's body with one token asked for; the connector stores every prompt."""
        return bodies.encode(bodies.prefill_leg(api, body, self.internal_keys, transfer))

    def read_handle(self, answer: bytes) -> Handle:
        """Check that prefill computed the prompt to its end.

        Raises:
            HandoffError: If the answer is no completion, or ended in an error.
        """
        try:
            read = _answer.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HandoffError(
                f"The prefill engine's answer does not tell that its KV was stored: {error}."
            ) from error
        return Handle(params=_NOTHING, engine_id="", prompt_tokens=read.usage.prompt_tokens, cached_tokens=None)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body: decode finds the KV by the prompt."""
        del handle
        return bodies.encode(bodies.decode_leg(api, body, self.internal_keys, transfer))
