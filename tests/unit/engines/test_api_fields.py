"""The legs of every client API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from disagg.engines import bodies
from disagg.engines.api_fields import FIELDS
from disagg.engines.base import Api, Peer, Transfer

TRANSFER = Transfer("k1", Peer())
KEYS = bodies.INTERNAL_KEYS
LONG: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": [], "max_tokens": 99, "max_completion_tokens": 98, "min_tokens": 5, "n": 1},
    Api.COMPLETIONS: {"prompt": "x", "max_tokens": 99, "min_tokens": 5},
    Api.RESPONSES: {"input": "x", "max_output_tokens": 99, "store": True},
    Api.MESSAGES: {"messages": [], "max_tokens": 99},
    Api.GENERATE: {"token_ids": [1], "sampling_params": {"max_tokens": 99, "min_tokens": 5, "top_k": 3}},
}


def body(**fields: object) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(fields).encode(), type=dict[str, msgspec.Raw])


def read(leg: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return dict(json.loads(bodies.encode(leg)))


def prefill_leg(api: Api, sent: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return bodies.prefill_leg(api, sent, KEYS, TRANSFER)


def decode_leg(api: Api, sent: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return bodies.decode_leg(api, sent, KEYS, TRANSFER)


def test_every_api_has_its_fields() -> None:
    """An API without a known cap would be decoded to its end on prefill."""
    assert set(FIELDS) == set(Api)


@pytest.mark.parametrize("api", list(Api))
def test_prefill_makes_one_token_of_every_api(api: Api) -> None:
    """Whatever the cap is called and wherever it stands, it is 1; floors and streams are gone."""
    leg = read(prefill_leg(api, body(stream=True, stream_options={"include_usage": True}, **LONG[api])))
    where = leg["sampling_params"] if api is Api.GENERATE else leg
    assert [where[cap] for cap in FIELDS[api].caps] == [1] * len(FIELDS[api].caps)
    assert leg["stream"] is False
    assert not {"stream_options", "min_tokens"} & {*leg, *where}


@pytest.mark.parametrize("api", list(Api))
def test_prefill_is_capped_where_the_client_set_no_cap(api: Api) -> None:
    """An absent cap means the engine's default, which is many tokens."""
    leg = read(prefill_leg(api, body(**{k: v for k, v in LONG[api].items() if "tokens" not in k})))
    where = leg.get("sampling_params", leg)
    assert all(where[cap] == 1 for cap in FIELDS[api].caps)


def test_what_is_nested_keeps_its_other_fields() -> None:
    """Sampling settings that are not about length stay: prefill refuses what decode would."""
    leg = read(prefill_leg(Api.GENERATE, body(**LONG[Api.GENERATE])))
    assert leg["sampling_params"] == {"max_tokens": 1, "top_k": 3}


def test_nested_choices_become_one() -> None:
    """`n` stands beside the cap."""
    leg = read(prefill_leg(Api.GENERATE, body(token_ids=[1], sampling_params={"n": 3})))
    assert leg["sampling_params"] == {"n": 1, "max_tokens": 1}


def test_responses_are_named_in_the_body_on_both_legs() -> None:
    """The header does not name them, and both legs of an attempt need the same name."""
    sent = body(input="x", request_id="resp_of_the_client")
    legs = [
        prefill_leg(Api.RESPONSES, sent),
        decode_leg(Api.RESPONSES, sent),
    ]
    assert [read(leg)["request_id"] for leg in legs] == ["resp_k1", "resp_k1"]
    assert "request_id" not in read(decode_leg(Api.CHAT, sent))


def test_prefill_stores_no_response() -> None:
    """Its answer is nobody's, and what is stored is never deleted."""
    leg = read(prefill_leg(Api.RESPONSES, body(input="x", store=True, background=False)))
    assert (leg["store"], leg["background"]) == (False, False)


def test_keys_hidden_in_extra_args_are_removed() -> None:
    """The tokens-in API merges them into what connectors read."""
    sent = body(
        token_ids=[1], sampling_params={"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}, "a": 1}}
    )
    assert bodies.holds_internal(sent, bodies.INTERNAL_KEYS)
    assert read(bodies.client_body(sent, bodies.INTERNAL_KEYS))["sampling_params"] == {"extra_args": {"a": 1}}


def test_an_escaped_key_is_found_as_well() -> None:
    """JSON has more than one spelling of a name."""
    raw = b'{"sampling_params":{"ex\\u0074ra_args":{"kv_tr\\u0061nsfer_params":{}}}}'
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    assert b"kv_tr" not in bodies.encode(bodies.client_body(fields, bodies.INTERNAL_KEYS))


def test_prefill_echoes_nothing_but_the_prompt() -> None:
    """Its own token must not be told apart from the prompt afterwards."""
    leg = read(prefill_leg(Api.COMPLETIONS, body(prompt="x", echo=True, max_tokens=9, logprobs=1)))
    assert (leg["echo"], leg["max_tokens"], leg["logprobs"]) == (True, 0, 1)


def test_decode_is_not_asked_about_the_prompt() -> None:
    """It would compute all of it again."""
    sent = body(prompt="x", echo=True, prompt_logprobs=1, max_tokens=9)
    assert read(decode_leg(Api.COMPLETIONS, sent)) == {"prompt": "x", "max_tokens": 9}
    assert read(bodies.decode_leg(Api.COMPLETIONS, sent, KEYS, None)) == read(sent)


@pytest.mark.parametrize(
    ("api", "fields", "reason"),
    [
        (Api.COMPLETIONS, {"echo": True}, None),
        (Api.COMPLETIONS, {"echo": True, "max_tokens": 0}, "echo-alone"),
        (Api.COMPLETIONS, {"echo": True, "return_token_ids": True}, "echo-token-ids"),
        (Api.CHAT, {"echo": True}, "echo"),
        (Api.CHAT, {"prompt_logprobs": 0}, None),
        (Api.COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt-logprobs-streamed"),
        (Api.GENERATE, {"sampling_params": {"prompt_logprobs": 1}}, "prompt-logprobs"),
        (Api.CHAT, {"echo": False, "prompt_logprobs": None}, None),
    ],
)
def test_what_cannot_be_put_together(api: Api, fields: dict[str, Any], reason: str | None) -> None:
    """Such requests stay on one engine, under this reason."""
    assert bodies.unmergeable(api, body(**fields)) == reason


@pytest.mark.parametrize(
    ("api", "fields", "count"),
    [
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (Api.COMPLETIONS, {"prompt": "1,2"}, None),
        (Api.COMPLETIONS, {"prompt": [[1, 2], [3]]}, None),
        (Api.COMPLETIONS, {"prompt": ["a,b", "c"]}, None),
        (Api.GENERATE, {"token_ids": [7]}, 1),
        (Api.CHAT, {"prompt": [1, 2]}, None),
    ],
)
def test_length_of_a_prompt_of_token_ids(api: Api, fields: dict[str, Any], count: int | None) -> None:
    """Known without a tokenizer, where the client sent ids."""
    assert bodies.prompt_ids(api, body(**fields)) == count


@pytest.mark.parametrize(
    ("raw", "several"),
    [
        (b'"text"', False),
        (b"[1,2]", False),
        (b"[[1,2]]", False),
        (b'["a"]', False),
        (b'["a","b"]', True),
        (b"[[1],[2]]", True),
        (b"[]", False),
        (b"", False),
        (b" " * 100 + b"[" + b" " * 100 + b'"a", "b"]', True),
        (b"[" + b" " * 100 + b"1, 2]", False),
        (b"null", False),
    ],
)
def test_a_list_of_prompts_is_told_from_one_prompt(raw: bytes, several: bool) -> None:
    """Whatever the white space, and without reading a long text."""
    assert bodies.holds_several(msgspec.Raw(raw)) is several
