"""The Mooncake handoff of vLLM: both legs leave together with a transfer id, and prefill writes into decode's blocks.

Decode finds prefill's workers through the bootstrap server of the prefill instance, which also tells the engine ids;
so each start of a prefill instance is asked once, before its first request. Prefill keeps KV only of a sequence that
reached its limit: stop conditions are therefore taken off its leg, whose one token nobody sees.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Call, Handle, Order, Peer, Transfer, url_host
from disagg.engines.vllm.common import VllmDialect, local_reason, rank_header, rank_of, read_completion, refused_leg
from disagg.errors import HandoffError
from disagg.http.messages import Header

_STOPS = ("stop", "stop_token_ids", "include_stop_str_in_output")
_TRUE = msgspec.Raw(b"true")


class _Rank(msgspec.Struct):
    engine_id: str


_ranks = msgspec.json.Decoder(dict[int, _Rank])


class MooncakeDialect(VllmDialect):
    """Concurrent legs tied together by a transfer id (`MooncakeConnector`)."""

    name = "mooncake"
    counts_handed_over = True
    order = Order.CONCURRENT
    pairs_first = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request stays on one engine; see `disagg.engines.base.Dialect`."""
        return local_reason(api, body, merges=False)

    def query(self, prefill: Peer) -> str | None:
        """The bootstrap server's list of ranks."""
        return None if prefill.ranks else f"{_bootstrap(prefill)}/query"

    def learn(self, prefill: Peer, answer: bytes) -> Peer:
        """Take the engine ids out of the bootstrap server's answer.

        Raises:
            HandoffError: If it names none, or leaves a rank out.
        """
        server = _bootstrap(prefill)
        try:
            ranks = _ranks.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HandoffError(f"The bootstrap server {server} did not name its engines: {error}.") from error
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            raise HandoffError(f"The bootstrap server {server} knows no workers yet.")
        return replace(prefill, ranks=tuple(ranks[n].engine_id for n in range(len(ranks))))

    def prefill_headers(self, transfer: Transfer) -> tuple[Header, ...]:
        """The data-parallel rank that decode is told of."""
        return rank_header(transfer)

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The client's body, capped at one token on which it cannot stop, not streamed, with the transfer's id."""
        leg = bodies.prefill_leg(api, body, self.internal_keys, transfer)
        for key in _STOPS:
            leg.pop(key, None)
        leg["ignore_eos"] = _TRUE
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer.key}
        leg["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(params))
        return bodies.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        """Check that prefill computed the prompt and kept it.

        Raises:
            HandoffError: If it did not.
        """
        return read_completion(answer, only_length=True)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body, with the transfer's id and prefill's bootstrap server.

        Raises:
            HandoffError: If the prefill engine is not known.
        """
        del handle
        leg = bodies.decode_leg(api, body, self.internal_keys, transfer)
        if transfer is not None:
            leg["kv_transfer_params"] = _sender(transfer)
        return bodies.encode(leg)

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        """A leg that decode refuses: it asks prefill for no blocks of this transfer."""
        del handle
        return refused_leg(api, _sender(transfer))


def _sender(transfer: Transfer) -> msgspec.Raw:
    prefill = transfer.prefill
    if not prefill.ranks:
        raise HandoffError("The prefill engine's id is not known: its bootstrap server has not been asked.")
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer.key,
        "remote_engine_id": prefill.ranks[rank_of(transfer)],
        "remote_bootstrap_addr": _bootstrap(prefill),
    }
    return msgspec.Raw(msgspec.json.encode(params))


def _bootstrap(prefill: Peer) -> str:
    if not (prefill.host and prefill.bootstrap_port):
        raise HandoffError(
            "The prefill instance's bootstrap server is not known.", hint="Give its port with the instance."
        )
    return f"http://{url_host(prefill.host)}:{prefill.bootstrap_port}"
