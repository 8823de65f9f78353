"""The LMCache handoff of vLLM: prefill sends its KV to a receiver of decode, which finds it by the prompt's tokens.

Decode's leg carries nothing, so decode can only be told apart by the receiver that prefill's leg names: it is chosen
before prefill is sent. Decode samples the first token itself, as with NIXL.
"""

from __future__ import annotations

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Handle, Transfer
from disagg.engines.vllm.common import VllmDialect, local_reason, read_completion
from disagg.errors import HandoffError


class LMCacheDialect(VllmDialect):
    """Serial legs tied together by the prompt's tokens (`LMCacheConnectorV1`)."""

    name = "lmcache"
    counts_handed_over = True
    pairs_first = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request stays on one engine; see `disagg.engines.base.Dialect`."""
        return local_reason(api, body, merges=True)

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The client's body, capped at one token, not streamed, with decode's receiver.

        Raises:
            HandoffError: If that is not known.
        """
        decode = transfer.decode
        if decode is None or not (decode.host and decode.side_channel_port and decode.alloc_port):
            raise HandoffError(
                "The decode instance's KV receiver is not known.",
                hint="Give its address and its two ports with the instance.",
            )
        leg = bodies.prefill_leg(api, body, self.internal_keys, transfer)
        # As lists: a decode instance has one receiver per tensor-parallel rank, on ports that follow each other.
        ranks = range(decode.tensor)
        spec = {
            "req_id": transfer.key,
            "receiver_host": decode.host,
            "receiver_init_port": [decode.side_channel_port + n for n in ranks],
            "receiver_alloc_port": [decode.alloc_port + n for n in ranks],
        }
        leg["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode({"disagg_spec": spec}))
        return bodies.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        """Check that prefill computed the prompt to its end.

        Raises:
            HandoffError: If it did not.
        """
        return read_completion(answer, only_length=False)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body: decode finds the KV by the prompt."""
        del handle
        return bodies.encode(bodies.decode_leg(api, body, self.internal_keys, transfer))
