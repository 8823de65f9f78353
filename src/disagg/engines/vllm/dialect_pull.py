"""The NIXL pull handoff of vLLM: prefill returns a list of its KV blocks, decode reads them.

The prefill leg is the client's body with one token asked for and ``kv_transfer_params`` that keep the blocks; its
answer carries the parameters for decode. Decode samples the first token itself, so prefill's text is dropped.
A wrong handle is worse than none: vLLM 0.32 answers 200 with another prompt's text for a stale one, and its decode
engine dies of an incomplete one. So `PullDialect.read_handle` checks every field before a decode engine sees it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Call, Handle, Transfer
from disagg.engines.vllm.common import TokenCount, Usage, VllmDialect, local_reason, refused_leg
from disagg.errors import HandoffError

KEEP_BLOCKS = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What tells the prefill engine to hold the prompt's blocks for another engine."""

_TRUE = msgspec.Raw(b"true")
_NONE = msgspec.Raw(b"")
# Bytes of messages from which on it costs decode more to tokenise them than to read their ids: some 2.5 µs a token
# against 0.1 µs, measured with vLLM 0.32 and SmolLM2's tokenizer.
_LONG_CHAT = 2048

BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
"""Checked further by `_is_visible`."""


class _PullParams(msgspec.Struct):
    """`kv_transfer_params` of prefill's answer. Fields that only a decode engine reads are not named here."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: Annotated[list[list[BlockId]], msgspec.Meta(min_length=1, max_length=1024)]
    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    remote_num_tokens: TokenCount
    transfer_mode: Literal["pull"]
    tp_size: Rank = 1
    pp_size: Rank = 1
    dcp_size: Rank = 1
    remote_prefill_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Answer(msgspec.Struct):
    usage: Usage
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = _NONE


_answer = msgspec.json.Decoder(_Answer)
_params = msgspec.json.Decoder(_PullParams)


def _is_visible(name: str) -> bool:
    """Whether all characters are visible ASCII ones, U+0021 to U+007E. A pattern for the decoder would cost more."""
    return name.isascii() and name.isprintable() and " " not in name


def _with_prompt(answer: _Answer) -> msgspec.Raw:
    """The handle, and with it the prompt's ids if a chat was asked for them: decode need not tokenise it again.

    Decode looks for text in the messages alone where it has to (media, `echo`), and takes the ids otherwise.
    """
    params, ids = answer.kv_transfer_params, answer.prompt_token_ids
    text = bytes(ids)
    if not text.startswith(b"[") or text.count(b",") + 1 != answer.usage.prompt():
        # A copy: a slice would keep prefill's whole answer alive as long as the handle.
        return params.copy()
    return msgspec.Raw(b'%b,"prompt_token_ids":%b}' % (bytes(params).rstrip()[:-1], text))


class PullDialect(VllmDialect):
    """Serial legs tied together by the block list that prefill returns (`NixlConnector`)."""

    name = "nixl-pull"

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request stays on one engine; see `disagg.engines.base.Dialect`."""
        return local_reason(api, body, merges=True)

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The client's body, capped at one token, not streamed, with the blocks kept."""
        leg = bodies.prefill_leg(api, body, self.internal_keys, transfer)
        leg["kv_transfer_params"] = KEEP_BLOCKS
        if api is Api.CHAT and memoryview(leg.get("messages", _NONE)).nbytes >= _LONG_CHAT:
            leg["return_token_ids"] = _TRUE
        return bodies.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        """Take the block list out of prefill's answer, whole and plausible or not at all.

        Raises:
            HandoffError: If the answer is no completion, or a field of the handle is missing or out of range.
        """
        try:
            outer = _answer.decode(answer)
            if bytes(outer.kv_transfer_params) == b"null":
                raise HandoffError(
                    "The prefill engine answered without kv_transfer_params.",
                    hint="It runs without a KV connector, or ended the request before it kept the blocks.",
                )
            params = _params.decode(outer.kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HandoffError(f"The prefill engine's answer has no usable KV handle: {error}.") from error
        if not params.do_remote_prefill or params.do_remote_decode:
            raise HandoffError("The prefill engine's handle is not turned round for a decode engine.")
        if not (
            _is_visible(params.remote_engine_id)
            and _is_visible(params.remote_request_id)
            and _is_visible(params.remote_host)
        ):
            raise HandoffError("The prefill engine's handle has a name with characters other than visible ASCII.")
        if not any(params.remote_block_ids):
            # An empty list passes vLLM's door and kills its scheduler.
            raise HandoffError("The prefill engine's handle names no KV blocks.")
        cached = params.remote_prefill_cached_tokens
        return Handle(
            params=_with_prompt(outer),
            engine_id=params.remote_engine_id,
            prompt_tokens=outer.usage.prompt(),
            cached_tokens=cached if cached is not None else outer.usage.cached_tokens,
        )

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body, with prefill's parameters as they came if there is a handle."""
        leg = bodies.decode_leg(api, body, self.internal_keys, transfer)
        if handle is not None:
            leg["kv_transfer_params"] = handle.params
        return bodies.encode(leg)

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        """A leg that decode refuses: it tells the owner of the blocks without reading them."""
        del transfer
        return refused_leg(api, handle.params) if handle is not None else None
