"""NIXL pull: what the contract suite cannot know, because only this dialect has a block list."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import Api, Body, Peer, Transfer
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.errors import HandoffError

DIALECT = PullDialect()
TRANSFER = Transfer("a" * 32, Peer())
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[0, 7]],
    "remote_engine_id": "prefill-0-abc",
    "remote_request_id": "chatcmpl-1-deadbeef",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 200,
    "transfer_mode": "pull",
}


def answer(params: object, **usage: Any) -> bytes:
    body = {"choices": [], "usage": {"prompt_tokens": 200, **usage}, "kv_transfer_params": params}
    return json.dumps(body).encode()


def test_prefill_is_told_to_keep_its_blocks() -> None:
    """Without these parameters it frees them with its answer, and decode would read reused ones."""
    leg = json.loads(DIALECT.prefill_body(Api.CHAT, msgspec.json.decode(b'{"messages":[]}', type=Body), TRANSFER))
    assert leg["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_a_whole_handle_is_read() -> None:
    """Identity for the router's own check, tokens for the bill."""
    read = DIALECT.read_handle(answer(PARAMS | {"remote_prefill_cached_tokens": 128}))
    assert (read.engine_id, read.prompt_tokens, read.cached_tokens) == ("prefill-0-abc", 200, 128)
    assert json.loads(bytes(read.params)) == PARAMS | {"remote_prefill_cached_tokens": 128}


def test_cache_hits_are_those_that_prefill_reports() -> None:
    """From the handle, else from the usage, else unknown: never what was transferred."""
    details = {"prompt_tokens_details": {"cached_tokens": 64}}
    assert DIALECT.read_handle(answer(PARAMS, **details)).cached_tokens == 64
    both = DIALECT.read_handle(answer(PARAMS | {"remote_prefill_cached_tokens": 0}, **details))
    assert both.cached_tokens == 0
    assert DIALECT.read_handle(answer(PARAMS)).cached_tokens is None
    assert DIALECT.read_handle(answer(PARAMS, prompt_tokens_details=None)).cached_tokens is None


def test_an_answer_without_a_handle_says_what_may_be_wrong() -> None:
    """A prefill engine without a connector looks healthy otherwise."""
    with pytest.raises(HandoffError, match="without a KV connector"):
        DIALECT.read_handle(answer(None))


@pytest.mark.parametrize("missing", [k for k in PARAMS if k != "tp_size"])
def test_an_incomplete_handle_never_reaches_decode(missing: str) -> None:
    """vLLM's decode engine dies of one, or parks the request for ever."""
    with pytest.raises(HandoffError):
        DIALECT.read_handle(answer({k: v for k, v in PARAMS.items() if k != missing}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_block_ids", []),
        ("remote_block_ids", [[]]),
        ("remote_block_ids", [[], []]),
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[1.5]]),
        ("remote_block_ids", [[True]]),
        ("remote_block_ids", None),
        ("remote_engine_id", ""),
        ("remote_engine_id", 7),
        ("remote_request_id", None),
        ("remote_host", ""),
        ("remote_host", "a b"),
        ("remote_host", "h\n"),
        ("remote_host", "h\x7f"),
        ("remote_host", "\x00"),
        ("remote_host", "h\u00e9"),
        ("remote_engine_id", "a b"),
        ("remote_engine_id", "e" * 513),
        ("remote_request_id", "r\t"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "5600"),
        ("remote_port", True),
        ("do_remote_prefill", False),
        ("do_remote_prefill", 1),
        ("do_remote_decode", True),
        ("transfer_mode", "push"),
        ("remote_num_tokens", 0),
        ("tp_size", 0),
    ],
)
def test_a_handle_out_of_range_never_reaches_decode(field: str, value: object) -> None:
    """Each of these ends in an assertion, a wait without end, or another prompt's words."""
    with pytest.raises(HandoffError):
        DIALECT.read_handle(answer(PARAMS | {field: value}))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), min_size=1, max_size=3).filter(any))
def test_any_plausible_block_list_passes_verbatim(blocks: list[list[int]]) -> None:
    """One list per cache group; a group may have nothing to read."""
    read = DIALECT.read_handle(answer(PARAMS | {"remote_block_ids": blocks}))
    assert json.loads(bytes(read.params))["remote_block_ids"] == blocks


def test_a_handle_does_not_keep_prefills_whole_answer_alive() -> None:
    """Thousands of requests wait between the legs; each would hold its prompt's token ids or logprobs."""
    big = answer(PARAMS, padding="x" * 100_000)
    before = sys.getrefcount(big)
    read = DIALECT.read_handle(big)
    assert sys.getrefcount(big) == before
    assert len(memoryview(read.params)) < 1_000


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ["a"] * 3])
def test_a_list_of_prompts_stays_local(prompts: list[Any]) -> None:
    """vLLM returns the handle of the first prompt only; the others' blocks would be lost."""
    body = msgspec.json.decode(json.dumps({"prompt": prompts}).encode(), type=Body)
    assert DIALECT.local_reason(Api.COMPLETIONS, body) == "prompt-list"
    assert DIALECT.local_reason(Api.CHAT, body) is None


def test_forced_tools_keep_the_prompt() -> None:
    """Some templates show tool choice and response format to the model, so dropping them would change its prompt."""
    text = b'{"messages":[],"tools":[{"a":1}],"tool_choice":"required","response_format":{"type":"json_object"}}'
    leg = json.loads(DIALECT.prefill_body(Api.CHAT, msgspec.json.decode(text, type=Body), TRANSFER))
    assert leg["tool_choice"] == "required"
    assert leg["response_format"] == {"type": "json_object"}


def test_a_long_chat_is_tokenised_once() -> None:
    """Prefill is asked for the ids, and decode gets them with the handle; a short one costs less as text."""
    for text, asked in (("x" * 3000, True), ("x" * 100, False)):
        body = msgspec.json.decode(json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), type=Body)
        assert json.loads(DIALECT.prefill_body(Api.CHAT, body, TRANSFER)).get("return_token_ids", False) is asked
        leg = json.loads(DIALECT.decode_body(Api.CHAT, body, TRANSFER, DIALECT.read_handle(answer(PARAMS))))
        assert "return_token_ids" not in leg, "the client did not ask for them"


@pytest.mark.parametrize(
    ("ids", "taken"), [([3] * 200, True), ([3] * 199, False), ([], False), (None, False), ({}, False)]
)
def test_ids_travel_with_the_handle_if_they_are_the_whole_prompt(ids: object, taken: bool) -> None:
    """Of a prompt with images they are not, and decode renders that itself."""
    given = json.loads(answer(PARAMS)) | {"prompt_token_ids": ids}
    read = json.loads(bytes(DIALECT.read_handle(json.dumps(given).encode()).params))
    assert read == (PARAMS | {"prompt_token_ids": ids} if taken else PARAMS)
