"""What vLLM's handoff dialects have in common: what stays on one engine, prefill's answer, how KV is let go."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Call, Dialect, Handle, Peer, Transfer
from disagg.errors import HandoffError
from disagg.http.messages import Header

NOTHING = msgspec.Raw(b"null")

_NO_MODEL = "disagg/nobody-will-fetch-this"
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

_VALUES = (
    ("prompt_embeds", "prompt-embeds"),
    # Where vLLM cuts depends on whether the body caps its output, and the legs' caps differ.
    ("truncate_prompt_tokens", "truncated-prompt"),
)


class _PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Usage(msgspec.Struct):
    """The `usage` of an answer, as far as a handoff needs it."""

    prompt_tokens: TokenCount | None = None
    input_tokens: TokenCount | None = None
    """What the responses and messages APIs call it."""
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens_details: _PromptDetails | None = None

    def prompt(self) -> int:
        """Length of the prompt, in tokens.

        Raises:
            HandoffError: If the answer does not tell it.
        """
        count = self.prompt_tokens or self.input_tokens
        if count is None:
            raise HandoffError("The prefill engine's answer does not tell the prompt's length.")
        return count

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine found in its cache, if it said so."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details is not None else None


class _Choice(msgspec.Struct):
    finish_reason: Literal["length", "stop", "tool_calls"]


class _Answer(msgspec.Struct):
    """The end of an answer: of chat and completions by choice, of messages and of responses as a whole."""

    usage: Usage
    choices: list[_Choice] = []
    stop_reason: Literal["max_tokens", "end_turn", "stop_sequence", "tool_use"] | None = None
    status: Literal["completed", "incomplete"] | None = None

    def has_ended(self) -> bool:
        return bool(self.choices) or self.stop_reason is not None or self.status is not None

    def reached_its_limit(self) -> bool:
        if self.choices:
            return all(choice.finish_reason == "length" for choice in self.choices)
        return self.stop_reason == "max_tokens" or self.status == "incomplete"


_answer = msgspec.json.Decoder(_Answer)


def local_reason(api: Api, body: Body, *, merges: bool) -> str | None:
    """Why a request stays on one engine; see `disagg.engines.base.Dialect`.

    Args:
        api: What the client called.
        body: What it sent.
        merges: Prefill's answer is there before decode's begins, so that it can be made a part of it. Without it,
            decode would need logits of the whole prompt for some requests, and it does not have them.
    """
    settings = bodies.sampling(api, body)
    for key, reason in _VALUES:
        if key in settings and not bodies.is_null(settings, key):
            return reason
    if ("echo" in body or "prompt_logprobs" in settings) and bodies.wants_prompt(api, body):
        why = bodies.unmergeable(api, body) or (None if merges else "wants-prompt")
        if why is None and "use_beam_search" in body and bodies.is_true(body, "use_beam_search"):
            why = "beam-search"
        if why is not None:
            return why
    prompt = body.get("prompt") if api is Api.COMPLETIONS else None
    return "prompt-list" if prompt is not None and bodies.holds_several(prompt) else None


def read_completion(answer: bytes, *, only_length: bool) -> Handle:
    """Check that prefill computed the prompt to its end, where its answer carries no parameters for decode.

    Args:
        answer: Prefill's whole answer.
        only_length: The connector keeps KV only of a sequence that reached its limit.

    Raises:
        HandoffError: If the answer is no completion, or one whose KV was dropped.
    """
    try:
        read = _answer.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffError(f"The prefill engine's answer does not tell that its KV was kept: {error}.") from error
    if not read.has_ended():
        raise HandoffError("The prefill engine's answer does not tell that its KV was kept: it has no end.")
    if only_length and not read.reached_its_limit():
        raise HandoffError(
            "The prefill engine's one token ended the sequence, so it dropped the KV.",
            hint="Its connector keeps KV only of sequences that reach their limit.",
        )
    return Handle(NOTHING, "", read.usage.prompt(), read.usage.cached_tokens)


def refused_leg(api: Api, params: msgspec.Raw) -> Call:
    """A decode leg that vLLM refuses at its door for a model that nobody serves.

    Since 0.32 the door tells the prefill engine that a refused request will not fetch its KV, so the blocks are free
    at once, and no KV moves. A leg that is admitted would have to read all of it first.
    """
    chat = api is Api.CHAT
    prompt = {"messages": [{"role": "user", "content": "-"}]} if chat else {"prompt": [0]}
    body = {"model": _NO_MODEL, **prompt, "max_tokens": 1, "kv_transfer_params": params}
    path = Api.CHAT if chat else Api.COMPLETIONS
    return Call(path.value, msgspec.json.encode(body), frozenset({404}))


class VllmDialect(Dialect):
    """What the engine itself brings to each of its connectors."""

    internal_keys = bodies.INTERNAL_KEYS
    takes_prompt_ids = True
    primes = True

    def cache_headers(self, decode: Peer, key: str) -> tuple[Header, ...]:
        """One data-parallel rank: left to itself, the engine chooses one for each sequence."""
        return _to_rank(decode, key)


def rank_of(transfer: Transfer) -> int:
    """The data-parallel rank of prefill that a transfer uses."""
    return _rank(transfer.prefill, transfer.key)


def rank_header(transfer: Transfer) -> tuple[Header, ...]:
    """Sends the prefill leg to the rank that decode is told of; nothing where there is only one."""
    return _to_rank(transfer.prefill, transfer.key)


def _rank(peer: Peer, key: str) -> int:
    # Spread evenly, because keys are random.
    return int(key[:8], 16) % (len(peer.ranks) or peer.data)


def _to_rank(peer: Peer, key: str) -> tuple[Header, ...]:
    return ((b"x-data-parallel-rank", b"%d" % _rank(peer, key)),) if (len(peer.ranks) or peer.data) > 1 else ()
