"""The content-keyed handoff: what differs from dialects that carry parameters."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from disagg.engines.base import Api, Body, Peer, Transfer
from disagg.engines.qaic.dialect import ContentDialect
from disagg.errors import HandoffError

DIALECT = ContentDialect()
TRANSFER = Transfer("a" * 32, Peer(), Peer())


def answer(reason: Any) -> bytes:
    return json.dumps({"choices": [{"finish_reason": reason}], "usage": {"prompt_tokens": 3}}).encode()


def test_no_parameters_travel_with_either_leg() -> None:
    """The connector finds the KV by the prompt; parameters would only be refused."""
    body = msgspec.json.decode(b'{"prompt":"x","kv_transfer_params":{"a":1}}', type=Body)
    read = DIALECT.read_handle(answer("length"))
    assert "kv_transfer_params" not in json.loads(DIALECT.prefill_body(Api.COMPLETIONS, body, TRANSFER))
    assert "kv_transfer_params" not in json.loads(DIALECT.decode_body(Api.COMPLETIONS, body, TRANSFER, read))


def test_decode_computes_no_prompts() -> None:
    """What cannot be handed over is refused by the router, rather than by an engine in words of its own."""
    assert not DIALECT.can_decode_alone


@pytest.mark.parametrize("reason", ["error", "abort", None, 3])
def test_a_prefill_that_did_not_finish_stored_nothing(reason: object) -> None:
    """Decode would look for the KV five times and fail a request that could be retried."""
    with pytest.raises(HandoffError):
        DIALECT.read_handle(answer(reason))


def test_a_list_of_prompts_is_handed_over_as_it_is() -> None:
    """Each prompt is stored under its own hash; the platform's tests send fifty at once."""
    body = msgspec.json.decode(b'{"prompt":["a","b"]}', type=Body)
    assert DIALECT.local_reason(Api.COMPLETIONS, body) is None
