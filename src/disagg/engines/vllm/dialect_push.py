"""The NIXL push handoff of vLLM: both legs leave together, and prefill writes its KV into decode's blocks.

There is no transfer id: prefill finds decode's registration by the request id that both engines make of the same
`x-request-id`, so both legs go to the same endpoint with the transfer's key as their id. Decode is told prefill's
engine id and side channel, which therefore have to be known beforehand.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Call, Handle, Order, Peer, Transfer
from disagg.engines.vllm.common import Usage, VllmDialect, local_reason, rank_header, rank_of
from disagg.errors import HandoffError
from disagg.http.messages import Header

_KEEP = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')


class _Params(msgspec.Struct):
    do_remote_prefill: Literal[True]
    remote_engine_id: str
    transfer_mode: Literal["push"]


class _Answer(msgspec.Struct):
    usage: Usage
    kv_transfer_params: msgspec.Raw


_answer = msgspec.json.Decoder(_Answer)
_params = msgspec.json.Decoder(_Params)


class PushDialect(VllmDialect):
    """Concurrent legs tied together by their common request id (`NixlPushConnector`)."""

    name = "nixl-push"
    counts_handed_over = True
    order = Order.CONCURRENT
    pairs_first = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request stays on one engine; see `disagg.engines.base.Dialect`."""
        return local_reason(api, body, merges=False)

    def prefill_headers(self, transfer: Transfer) -> tuple[Header, ...]:
        """The data-parallel rank that decode is told of."""
        return rank_header(transfer)

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The client's body, capped at one token, not streamed, with the blocks kept for the writer."""
        leg = bodies.prefill_leg(api, body, self.internal_keys, transfer)
        leg["kv_transfer_params"] = _KEEP
        return bodies.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        """Check that prefill computed the prompt and kept it.

        Raises:
            HandoffError: If it did not.
        """
        try:
            read = _answer.decode(answer)
            params = _params.decode(read.kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HandoffError(f"The prefill engine's answer does not tell that its KV was kept: {error}.") from error
        usage = read.usage
        raw = read.kv_transfer_params.copy()
        return Handle(raw, params.remote_engine_id, usage.prompt(), usage.cached_tokens)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body, with prefill's engine and side channel.

        Raises:
            HandoffError: If these are not known.
        """
        del handle
        leg = bodies.decode_leg(api, body, self.internal_keys, transfer)
        if transfer is not None:
            leg["kv_transfer_params"] = _writer(transfer)
        return bodies.encode(leg)

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        """Nothing ends the wait of a writer: vLLM 0.32 keeps its blocks until the time for a registration is over."""
        return None


def _writer(transfer: Transfer) -> msgspec.Raw:
    prefill = transfer.prefill
    if not (prefill.engine_id and prefill.host and prefill.side_channel_port):
        raise HandoffError(
            "The prefill engine's id or side channel is not known, so decode cannot be told where its KV is.",
            hint="Give them with the instance, or use link.dialect nixl-pull.",
        )
    rank = rank_of(transfer)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_of_rank(prefill, rank),
        # Has to be there; what prefill calls the request inside nobody knows yet.
        "remote_request_id": transfer.key,
        "remote_host": prefill.host,
        "remote_port": prefill.side_channel_port + rank,
        "tp_size": prefill.tensor,
        "pp_size": prefill.pipeline,
    }
    return msgspec.Raw(msgspec.json.encode(params))


def engine_of_rank(prefill: Peer, rank: int) -> str:
    """How vLLM calls one data-parallel rank of an engine."""
    return f"{prefill.engine_id}_dp{rank}" if prefill.data > 1 else prefill.engine_id
