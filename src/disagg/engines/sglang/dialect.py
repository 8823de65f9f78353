"""The bootstrap handoff of SGLang: the same body to both legs at once, tied together by a room.

Prefill and decode meet in a room of prefill's bootstrap server; a batch needs one for each of its sequences. Prefill
stops after its one token by itself, and the token travels to decode with the KV, so limits and stop conditions are
the client's on both legs. A closed connection is noticed late, so a leg that is given up is aborted by its `rid` as
well.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body, Call, Dialect, Handle, Order, Transfer
from disagg.errors import HandoffError

_MAX_BATCH = 1024


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Answer(msgspec.Struct):
    usage: _Usage


_answer = msgspec.json.Decoder(_Answer)


class BootstrapDialect(Dialect):
    """Concurrent legs tied together by bootstrap rooms."""

    name = "sglang"
    internal_keys = bodies.INTERNAL_KEYS
    order = Order.CONCURRENT
    pairs_first = True
    can_decode_alone = False

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why a request cannot be handed over; several sequences can, each has a room of its own."""
        return "large-batch" if _rooms(api, body) > _MAX_BATCH else None

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The decode leg's body, not streamed: nobody reads prefill's words, but its end has to be seen.

        Raises:
            HandoffError: If prefill's bootstrap server is not known.
        """
        leg = self._tied(api, body, transfer)
        leg.pop("stream_options", None)
        leg["stream"] = bodies.FALSE
        return bodies.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        """Check that prefill answered; by then its KV has left.

        Raises:
            HandoffError: If the answer is no completion.
        """
        try:
            read = _answer.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HandoffError(f"The prefill server's answer is no completion: {error}.") from error
        return Handle(msgspec.Raw(b"null"), "", read.usage.prompt_tokens, None)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The client's own body with the rooms.

        Raises:
            HandoffError: If prefill's bootstrap server is not known.
        """
        del handle
        if transfer is None:
            return bodies.encode(bodies.client_body(body, self.internal_keys))
        return bodies.encode(self._tied(api, body, transfer))

    def abort(self, transfer: Transfer) -> Call | None:
        """End the request on either side by the id in its body."""
        return Call("/abort_request", msgspec.json.encode({"rid": transfer.key}))

    def _tied(self, api: Api, body: Body, transfer: Transfer) -> dict[str, msgspec.Raw]:
        prefill = transfer.prefill
        if not prefill.host:
            raise HandoffError(
                "The prefill server's bootstrap address is not known.", hint="Give it with the instance."
            )
        leg = bodies.client_body(body, self.internal_keys)
        port = prefill.bootstrap_port or None
        count = _rooms(api, body)
        rooms = [_room(transfer.key, n) for n in range(count)]
        one = count == 1
        fields: dict[str, object] = {
            "bootstrap_host": prefill.host if one else [prefill.host] * count,
            "bootstrap_port": port if one else [port] * count,
            "bootstrap_room": rooms[0] if one else rooms,
            "rid": transfer.key,
        }
        leg |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        return leg


def _rooms(api: Api, body: Body) -> int:
    """How many sequences a body makes: prompts times choices."""
    prompt = body.get("prompt") if api is Api.COMPLETIONS else None
    return (bodies.prompt_count(prompt) if prompt is not None else 1) * bodies.count_at(body, "n")


def _room(key: str, index: int) -> int:
    """A number in [0, 2^63) that nobody can guess who does not know the key, for each sequence of a transfer."""
    digest = hashlib.blake2b(f"{key}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
