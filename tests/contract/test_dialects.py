"""One suite for every handoff dialect: what both legs may change, what never leaves, what a handle survives."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import Api, Body, Dialect, Handle, Order, Peer, Transfer
from disagg.engines.bodies import is_true, priming, several
from disagg.engines.qaic.dialect import ContentDialect
from disagg.engines.registry import ADAPTERS, load_adapter
from disagg.engines.sglang.dialect import BootstrapDialect
from disagg.engines.vllm.dialect_lmcache import LMCacheDialect
from disagg.engines.vllm.dialect_mooncake import MooncakeDialect
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.engines.vllm.dialect_push import PushDialect
from disagg.errors import HandoffError
from tests.support.engine_cases import pair

NAMES = [name for name, target in ADAPTERS.items() if find_spec(target.partition(":")[0]) is not None]
FAMILIES: list[Dialect] = [
    PullDialect(),
    PushDialect(),
    MooncakeDialect(),
    LMCacheDialect(),
    ContentDialect(),
    BootstrapDialect(),
]
DIALECTS = [pytest.param(dialect, id=dialect.name) for dialect in FAMILIES]
# SGLang's prefill stops after one token by itself, and gets the client's own limits.
CAPPING = [pytest.param(dialect, id=dialect.name) for dialect in FAMILIES if dialect.name != "sglang"]
CONCURRENT = [pytest.param(d, id=d.name) for d in FAMILIES if d.order is Order.CONCURRENT]
TRANSFER = Transfer(
    "00000001" + "ab" * 12,
    Peer("prefill-0-abc", "127.0.0.1", 5600, 0, 8998, ranks=("prefill-0-abc",)),
    Peer("decode-0-def", "127.0.0.2", 5700, 5701),
)
INTERNAL = ["kv_transfer_params", "ec_transfer_params", "bootstrap_room", "disaggregated_params", "request_id"]

# What a prefill leg may drop or set; everything else shapes the prompt, or is checked there before KV is pinned.
STOPS = {"ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output"}
EDITED = {
    "stream", "stream_options", "min_tokens", "max_tokens", "max_completion_tokens", "n", "best_of",
    "use_beam_search", *STOPS,
}  # fmt: skip
# Prefill tells about the prompt, so decode is not asked.
TOLD = {"echo", "prompt_logprobs"}
TIES = {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        *INTERNAL,
        "model",
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "min_tokens",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "vllm_xargs",
        "temperature",
        "logprobs",
        "chat_template_kwargs",
        *sorted(TOLD),
    ]
) | st.text(max_size=6)
APIS = st.sampled_from([Api.CHAT, Api.COMPLETIONS])

GOOD: dict[str, Any] = {
    "id": "cmpl-1",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[4, 5]],
        "remote_engine_id": "prefill-0-abc",
        "remote_request_id": "cmpl-1-0-deadbeef",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": 12,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    },
}


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """A client's body as the router reads it, with spacing and order that must survive."""
    fields = draw(st.dictionaries(KEYS, JSON, max_size=10))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :\t")]))
    text = json.dumps(fields, separators=separators, ensure_ascii=draw(st.booleans()))
    return msgspec.json.decode(text.encode(), type=Body)


def as_bytes(body: Body) -> dict[str, bytes]:
    return {key: bytes(value) for key, value in body.items()}


def parsed(leg: bytes) -> dict[str, bytes]:
    return as_bytes(msgspec.json.decode(leg, type=Body))


def handle(dialect: Dialect) -> Handle:
    return dialect.read_handle(json.dumps(good(dialect)).encode())


def good(dialect: Dialect) -> dict[str, Any]:
    """Prefill's answer when all is well."""
    answer: dict[str, Any] = json.loads(json.dumps(GOOD))
    if dialect.name == "nixl-push":
        answer["kv_transfer_params"]["transfer_mode"] = "push"
    return answer


@pytest.mark.parametrize("dialect", DIALECTS)
class TestLegs:
    """Both legs against the client's body."""

    @given(api=APIS, body=bodies())
    def test_what_shapes_the_prompt_is_the_same_bytes_in_the_same_order(
        self, dialect: Dialect, api: Api, body: Body
    ) -> None:
        """Legs that render to different prompts would decode another prompt's KV."""
        before = as_bytes(body)
        # Objects that connectors read are written anew.
        rewritten = dialect.internal_keys | {"vllm_xargs", "sampling_params"}
        for leg, may_differ in (
            (dialect.prefill_body(api, body, TRANSFER), EDITED | TIES),
            (dialect.decode_body(api, body, TRANSFER, handle(dialect)), TIES | TOLD),
            (dialect.decode_body(api, body, None, None), set()),
        ):
            sent = parsed(leg)
            kept = [k for k in before if k not in may_differ and k not in rewritten]
            assert {k: sent[k] for k in kept} == {k: before[k] for k in kept}
            assert [k for k in sent if k in kept] == kept
            assert sent.keys() <= before.keys() | may_differ

    @given(api=APIS, body=bodies())
    def test_a_clients_internal_keys_never_leave(self, dialect: Dialect, api: Api, body: Body) -> None:
        """They would let one user read another's cache, or stop an engine."""
        poisoned: Body = {**body, **{key: msgspec.Raw(b'"from-the-client"') for key in dialect.internal_keys}}
        for leg in (
            dialect.prefill_body(api, poisoned, TRANSFER),
            dialect.decode_body(api, poisoned, TRANSFER, handle(dialect)),
            dialect.decode_body(api, poisoned, None, None),
        ):
            assert b"from-the-client" not in leg

    @given(api=APIS, body=bodies())
    def test_building_a_leg_is_pure(self, dialect: Dialect, api: Api, body: Body) -> None:
        """A retry builds from the same body and must get the same leg."""
        before = as_bytes(body)
        order = list(body)
        assert dialect.prefill_body(api, body, TRANSFER) == dialect.prefill_body(api, body, TRANSFER)
        assert dialect.decode_body(api, body, None, None) == dialect.decode_body(api, body, None, None)
        assert dialect.local_reason(api, body) == dialect.local_reason(api, body)
        assert as_bytes(body) == before
        assert list(body) == order

    @given(api=APIS, body=bodies())
    def test_a_leg_of_a_leg_is_the_leg(self, dialect: Dialect, api: Api, body: Body) -> None:
        """Nothing grows or moves when a leg passes through twice."""
        once = dialect.prefill_body(api, body, TRANSFER)
        again = dialect.prefill_body(api, msgspec.json.decode(once, type=Body), TRANSFER)
        assert parsed(again) == parsed(once)
        decode = dialect.decode_body(api, body, None, None)
        assert dialect.decode_body(api, msgspec.json.decode(decode, type=Body), None, None) == decode

    @given(api=APIS, body=bodies())
    def test_prefill_does_not_stream(self, dialect: Dialect, api: Api, body: Body) -> None:
        """A stream carries no handle, and nobody reads prefill's words."""
        leg = json.loads(dialect.prefill_body(api, body, TRANSFER))
        assert leg["stream"] is False
        assert "stream_options" not in leg

    @pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params", "\\u006bv_transfer_params"])
    def test_internal_keys_hidden_in_extension_arguments_are_found(self, dialect: Dialect, key: str) -> None:
        """vLLM merges vllm_xargs into the dictionary that its connectors read, escapes resolved."""
        text = f'{{"prompt":"p","vllm_xargs":{{"a":1,"{key}":"from-the-client","b":[2]}}}}'
        body = msgspec.json.decode(text.encode(), type=Body)
        for leg in (
            dialect.prefill_body(Api.COMPLETIONS, body, TRANSFER),
            dialect.decode_body(Api.COMPLETIONS, body, None, None),
        ):
            assert json.loads(leg)["vllm_xargs"] == {"a": 1, "b": [2]}

    def test_extension_arguments_that_cannot_be_read_do_not_pass(self, dialect: Dialect) -> None:
        """The engine's parser takes a lone surrogate; whoever uses one hides the key beside it."""
        deep = b'{"kv_transfer_params":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for extra in (b'{"\\ud800":1,"kv_transfer_params":"x"}', deep):
            body: Body = {"vllm_xargs": msgspec.Raw(extra)}
            assert b"kv_transfer_params" not in dialect.decode_body(Api.COMPLETIONS, body, None, None)

    @given(api=APIS, body=bodies())
    def test_a_reason_for_the_local_path_is_a_short_slug(self, dialect: Dialect, api: Api, body: Body) -> None:
        """It labels metrics and a header, whatever a client sent."""
        reason = dialect.local_reason(api, body)
        assert reason is None or (reason.replace("-", "").isalnum() and reason.islower() and len(reason) <= 32)


@pytest.mark.parametrize("dialect", CAPPING)
class TestCaps:
    """One token on prefill, in each API's own words."""

    @given(api=APIS, body=bodies())
    def test_prefill_makes_one_token(self, dialect: Dialect, api: Api, body: Body) -> None:
        """A prefill that decodes the whole answer does decode's work; a floor above the cap is refused.

        An echoed prompt is asked for without even that one token, which would stand behind it in the text.
        """
        leg = json.loads(dialect.prefill_body(api, body, TRANSFER))
        echoes = api is Api.COMPLETIONS and is_true(body, "echo")
        assert leg["max_tokens"] == (0 if echoes else 1)
        assert leg.get("max_completion_tokens", 1) == 1 or api is Api.COMPLETIONS
        assert "min_tokens" not in leg

    def test_chat_caps_both_spellings(self, dialect: Dialect) -> None:
        """The newer one wins in the engine, so it has to be capped as well."""
        body = msgspec.json.decode(b'{"messages":[],"max_completion_tokens":9}', type=Body)
        leg = json.loads(dialect.prefill_body(Api.CHAT, body, TRANSFER))
        assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize("dialect", DIALECTS)
class TestHandles:
    """What prefill answered."""

    def test_a_handle_reaches_decode_verbatim(self, dialect: Dialect) -> None:
        """The engine's parameters are its own: not re-ordered, not re-spelled, not completed."""
        answered = good(dialect)
        params = json.dumps(
            answered["kv_transfer_params"] | {"unknown_field": 1.0, "z": {"b": 1, "a": [2]}}, indent=1
        )
        text = json.dumps({k: v for k, v in answered.items() if k != "kv_transfer_params"})
        answer = f'{text[:-1]}, "kv_transfer_params": {params}}}'.encode()
        read = dialect.read_handle(answer)
        leg = dialect.decode_body(Api.CHAT, msgspec.json.decode(b'{"messages":[]}', type=Body), TRANSFER, read)
        if bytes(read.params) != b"null" and dialect.order is Order.SERIAL:
            assert parsed(leg)["kv_transfer_params"] == params.encode()
        else:
            assert b"unknown_field" not in leg

    def test_the_prompts_length_is_taken_from_prefill(self, dialect: Dialect) -> None:
        """The bill's prompt tokens are what prefill counted."""
        assert handle(dialect).prompt_tokens == 12

    @given(answer=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
    def test_junk_is_a_handoff_error_and_nothing_else(self, dialect: Dialect, answer: bytes) -> None:
        """A broken engine is retried elsewhere; a traceback would end the request as our fault."""
        with pytest.raises(HandoffError):
            dialect.read_handle(answer)

    @given(data=st.data())
    def test_a_damaged_answer_is_a_handoff_error_or_still_whole(self, dialect: Dialect, data: st.DataObject) -> None:
        """Whatever is changed in a good answer, the reader gives a handle or refuses, and raises nothing else."""
        answer = good(dialect)
        section = data.draw(st.sampled_from([answer, answer["usage"], answer["kv_transfer_params"]]))
        key = data.draw(st.sampled_from(sorted(section)))
        value = data.draw(JSON | st.just(msgspec.UNSET))
        if value is msgspec.UNSET:
            del section[key]
        else:
            section[key] = value
        try:
            read = dialect.read_handle(json.dumps(answer).encode())
        except HandoffError:
            return
        assert read.prompt_tokens >= 1

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"null",
            b"[]",
            b'{"error":{"message":"no"}}',
            b'{"usage":{"prompt_tokens":0},"choices":[]}',
            b"{" * 100_000,
            b'{"usage":' + b"[" * 100_000,
            b'{"junk":' + b"[" * 100_000,
            b'{"usage":{"prompt_tokens":99999999999999999999},"choices":[{"finish_reason":"length"}]}',
            b"\xff\xfe",
        ],
    )
    def test_hostile_answers_are_refused(self, dialect: Dialect, answer: bytes) -> None:
        """Deep nesting and huge numbers included."""
        with pytest.raises(HandoffError):
            dialect.read_handle(answer)


@pytest.mark.parametrize("dialect", CAPPING)
@pytest.mark.parametrize(
    ("api", "fields", "reason"),
    [
        (Api.CHAT, {"echo": "true"}, "echo"),
        (Api.COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt-embeds"),
        (Api.CHAT, {"truncate_prompt_tokens": -1}, "truncated-prompt"),
        (Api.CHAT, {"n": 1, "echo": False, "prompt_logprobs": None, "best_of": 1}, None),
        (Api.CHAT, {"n": "many", "best_of": None}, None),
        (Api.COMPLETIONS, {"prompt": "text", "logprobs": 3, "max_tokens": 1}, None),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (Api.COMPLETIONS, {"prompt": ["one"]}, None),
        (Api.COMPLETIONS, {"prompt": [[1, 2]]}, None),
        (Api.COMPLETIONS, {"prompt": []}, None),
        (Api.CHAT, {"tools": [{"type": "function"}], "tool_choice": "required", "stream": True}, None),
    ],
)
def test_only_what_cannot_be_handed_over_stays_local(
    dialect: Dialect, api: Api, fields: dict[str, Any], reason: str | None
) -> None:
    """Too strict wastes the pools; too lax gives wrong answers."""
    assert dialect.local_reason(api, msgspec.json.decode(json.dumps(fields).encode(), type=Body)) == reason


SEVERAL = [
    (Api.CHAT, {"n": 2}, "n-greater-1"),
    (Api.COMPLETIONS, {"n": "3"}, "n-greater-1"),
    (Api.COMPLETIONS, {"n": 2.5}, "n-greater-1"),
    (Api.COMPLETIONS, {"best_of": 2}, "best-of-greater-1"),
    (Api.CHAT, {"use_beam_search": True}, "beam-search"),
    (Api.COMPLETIONS, {"use_beam_search": "yes", "n": 4}, "beam-search"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("api", "fields", "reason"), SEVERAL)
def test_several_choices_are_primed_or_each_has_a_handover_or_they_stay_local(
    dialect: Dialect, api: Api, fields: dict[str, Any], reason: str
) -> None:
    """A handle is read once. SGLang has a room for each sequence; Cloud AI's decode takes what it loads out."""
    body = msgspec.json.decode(json.dumps(fields).encode(), type=Body)
    assert several(api, body) == reason
    own = "n-greater-1" if "n" in fields else reason
    assert dialect.local_reason(api, body) == (own if dialect.name == "content-keyed" else None)
    assert dialect.primes is (dialect.name in {"nixl-pull", "nixl-push", "mooncake", "lmcache"})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_legs_with_one_key_go_to_one_cache(dialect: Dialect) -> None:
    """A decode engine with data-parallel ranks has a prefix cache in each; with one there is nothing to choose."""
    assert dialect.cache_headers(Peer(), "ab" * 16) == ()
    keys = [f"{n:08x}" + "ab" * 12 for n in range(64)]
    chosen = [dialect.cache_headers(Peer(data=4), key) for key in keys]
    assert chosen == [dialect.cache_headers(Peer(data=4), key) for key in keys]
    wanted = {((b"x-data-parallel-rank", b"%d" % n),) for n in range(4)} if dialect.primes else {()}
    assert set(chosen) == wanted


def test_apis_without_choices_have_one() -> None:
    """Their engines ignore such fields, so nothing has to be primed."""
    body = msgspec.json.decode(b'{"n":2,"best_of":2,"use_beam_search":true}', type=Body)
    assert several(Api.RESPONSES, body) is several(Api.MESSAGES, body) is None


@pytest.mark.parametrize("wish", [{"echo": True}, {"prompt_logprobs": 1}])
@pytest.mark.parametrize("dialect", [pytest.param(d, id=d.name) for d in FAMILIES if d.primes])
def test_a_beam_search_that_wants_its_prompt_stays_local(dialect: Dialect, wish: dict[str, Any]) -> None:
    """It has no log probabilities of the prompt that could be put together with prefill's."""
    body = msgspec.json.decode(json.dumps({"use_beam_search": True, **wish}).encode(), type=Body)
    together = dialect.order is Order.CONCURRENT
    assert dialect.local_reason(Api.COMPLETIONS, body) == ("wants-prompt" if together else "beam-search")


@pytest.mark.parametrize("dialect", [pytest.param(d, id=d.name) for d in FAMILIES if d.primes])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.GENERATE])
def test_a_priming_leg_fetches_the_kv_and_does_as_little_as_possible(dialect: Dialect, api: Api) -> None:
    """The same prompt, tied to prefill as decode's leg is; one token, one choice, no stream, no beams."""
    settings = {"n": 3, "best_of": 4, "max_tokens": 50, "min_tokens": 9, "seed": 1}
    fields: dict[str, Any] = {"prompt": "x", "tools": [1.50], "stream": True, "stream_options": {}, "logprobs": 1}
    if api is Api.GENERATE:
        fields["sampling_params"] = settings
    else:
        fields |= {**settings, "use_beam_search": True, "prompt_logprobs": 2}
    body = msgspec.json.decode(json.dumps(fields).encode(), type=Body)
    whole = fields_of(dialect.decode_body(api, body, TRANSFER, handle(dialect)))
    leg = fields_of(dialect.decode_body(api, priming(api, body), TRANSFER, handle(dialect)))
    assert {k: leg.get(k) for k in TIES} == {k: whole.get(k) for k in TIES}
    assert (leg["prompt"], leg["tools"], leg["stream"]) == ("x", [1.5], False)
    assert not {"stream_options", "use_beam_search", "prompt_logprobs"} & set(leg)
    shown = leg["sampling_params"] if api is Api.GENERATE else leg
    assert (shown["n"], shown["max_tokens"], shown["seed"]) == (1, 1, 1)
    assert "min_tokens" not in shown
    if api is not Api.GENERATE:
        assert leg["best_of"] == 1
    prefill = fields_of(dialect.prefill_body(api, body, TRANSFER))
    assert "use_beam_search" not in prefill


@pytest.mark.parametrize("dialect", CAPPING)
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 0}, {"echo": True}, {"echo": True, "logprobs": 2}])
def test_what_prefill_has_to_tell_needs_its_answer_first(dialect: Dialect, fields: dict[str, Any]) -> None:
    """Where the legs leave together it is not there when decode's begins, and decode has no logits of the prompt."""
    body = msgspec.json.decode(json.dumps(fields).encode(), type=Body)
    merges = dialect.name in {"nixl-pull", "lmcache"}
    assert (dialect.local_reason(Api.COMPLETIONS, body) is None) is merges
    if merges:
        leg = fields_of(dialect.decode_body(Api.COMPLETIONS, body, TRANSFER, handle(dialect)))
        assert not {"echo", "prompt_logprobs"} & set(leg)
        assert fields_of(dialect.decode_body(Api.COMPLETIONS, body, None, None)) == fields


def fields_of(leg: bytes) -> dict[str, Any]:
    parsed_leg: dict[str, Any] = json.loads(leg)
    return parsed_leg


BODY: Body = {"prompt": msgspec.Raw(b'"x"'), "stop": msgspec.Raw(b'"!"')}


@pytest.mark.parametrize("dialect", CONCURRENT)
class TestKeys:
    """What ties legs that leave together."""

    def test_a_new_transfer_is_tied_by_other_values(self, dialect: Dialect) -> None:
        """A retried prefill that meets the decode leg of the attempt before would serve another request's KV."""
        again = msgspec.structs.replace(TRANSFER, key="f" * 32)
        for one, other in (
            (dialect.decode_body(Api.CHAT, BODY, TRANSFER, None), dialect.decode_body(Api.CHAT, BODY, again, None)),
        ):
            assert one != other

    def test_both_legs_name_the_same_transfer(self, dialect: Dialect) -> None:
        """Or the engines would wait for each other until their time-outs."""
        legs = (
            fields_of(dialect.prefill_body(Api.CHAT, BODY, TRANSFER)),
            fields_of(dialect.decode_body(Api.CHAT, BODY, TRANSFER, None)),
        )
        for key in ("bootstrap_room", "rid"):
            assert legs[0].get(key) == legs[1].get(key)
        ids = [leg.get("kv_transfer_params", {}).get("transfer_id") for leg in legs]
        assert ids[0] == ids[1]

    def test_a_prefill_instance_that_nobody_knows_is_no_partner(self, dialect: Dialect) -> None:
        """Decode would park such a request for good, so it is not sent."""
        with pytest.raises(HandoffError):
            dialect.decode_body(Api.CHAT, BODY, Transfer("a" * 32, Peer(), Peer()), None)


def test_push_names_the_writer_and_no_blocks() -> None:
    """Prefill's blocks are not known when both legs leave."""
    leg = fields_of(PushDialect().decode_body(Api.CHAT, BODY, TRANSFER, None))
    params = leg["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_engine_id"], params["remote_host"], params["remote_port"]) == (
        "prefill-0-abc",
        "127.0.0.1",
        5600,
    )
    assert "remote_request_id" in params
    assert "remote_block_ids" not in params


def test_with_several_ranks_both_legs_mean_the_same_one() -> None:
    """The KV is on one rank: prefill is steered to it, and decode told its name and port."""
    wide = msgspec.structs.replace(TRANSFER, prefill=replace(TRANSFER.prefill, data=4, ranks=()))
    dialect = PushDialect()
    assert dialect.prefill_headers(wide) == ((b"x-data-parallel-rank", b"1"),)
    params = fields_of(dialect.decode_body(Api.CHAT, BODY, wide, None))["kv_transfer_params"]
    assert (params["remote_engine_id"], params["remote_port"]) == ("prefill-0-abc_dp1", 5601)
    assert dialect.prefill_headers(TRANSFER) == ()


def test_mooncake_learns_its_ranks_from_the_bootstrap_server() -> None:
    """Asked once per start; an answer without workers is no answer."""
    dialect = MooncakeDialect()
    stranger = Peer("", "::1", bootstrap_port=8998)
    assert dialect.query(stranger) == "http://[::1]:8998/query"
    known = dialect.learn(stranger, b'{"0":{"engine_id":"a","worker_addr":{}},"1":{"engine_id":"b"}}')
    assert known.ranks == ("a", "b")
    assert dialect.query(known) is None
    for answer in (b"{}", b'{"1":{"engine_id":"b"}}', b"[]", b"", b'{"x":{"engine_id":"a"}}', b"{" * 99_999):
        with pytest.raises(HandoffError):
            dialect.learn(stranger, answer)


def test_a_mooncake_prefill_cannot_stop_on_its_token() -> None:
    """It would drop the KV, and decode would wait for it."""
    leg = fields_of(MooncakeDialect().prefill_body(Api.COMPLETIONS, BODY, TRANSFER))
    assert leg["ignore_eos"] is True
    assert "stop" not in leg
    stopped = json.dumps({"usage": {"prompt_tokens": 3}, "choices": [{"finish_reason": "stop"}]}).encode()
    with pytest.raises(HandoffError, match="dropped"):
        MooncakeDialect().read_handle(stopped)


def test_lmcache_names_decodes_receiver_to_prefill_alone() -> None:
    """Decode finds the KV by the prompt's tokens."""
    dialect = LMCacheDialect()
    spec = fields_of(dialect.prefill_body(Api.CHAT, BODY, TRANSFER))["kv_transfer_params"]["disagg_spec"]
    assert spec == {
        "req_id": TRANSFER.key,
        "receiver_host": "127.0.0.2",
        "receiver_init_port": [5700],
        "receiver_alloc_port": [5701],
    }
    assert "kv_transfer_params" not in fields_of(dialect.decode_body(Api.CHAT, BODY, TRANSFER, None))
    with pytest.raises(HandoffError):
        dialect.prefill_body(Api.CHAT, BODY, Transfer("a" * 32, Peer()))


@pytest.mark.parametrize(
    ("api", "fields", "count"),
    [
        (Api.CHAT, {"n": 3}, 3),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, 2),
        (Api.COMPLETIONS, {"prompt": [[1], [2]], "n": 2}, 4),
    ],
)
def test_each_sequence_of_an_sglang_batch_has_a_room(api: Api, fields: dict[str, Any], count: int) -> None:
    """Arrays of equal length, and no room twice."""
    body = msgspec.json.decode(json.dumps(fields).encode(), type=Body)
    leg = fields_of(BootstrapDialect().decode_body(api, body, TRANSFER, None))
    assert leg["bootstrap_host"] == ["127.0.0.1"] * count
    assert leg["bootstrap_port"] == [8998] * count
    assert len(set(leg["bootstrap_room"])) == count
    assert all(0 <= room < 2**63 for room in leg["bootstrap_room"])


def test_one_sglang_sequence_has_one_room_and_an_id_to_abort_it_by() -> None:
    """Scalars, not arrays; and the id in the body is what an abort names."""
    dialect = BootstrapDialect()
    leg = fields_of(dialect.decode_body(Api.CHAT, BODY, TRANSFER, None))
    assert isinstance(leg["bootstrap_room"], int)
    call = dialect.abort(TRANSFER)
    assert call is not None
    assert (call.path, json.loads(call.body)) == ("/abort_request", {"rid": leg["rid"]})


@pytest.mark.parametrize("dialect", [PullDialect(), MooncakeDialect()], ids=lambda d: d.name)
def test_kv_is_let_go_by_a_leg_that_decode_refuses(dialect: Dialect) -> None:
    """It names the KV as the decode leg does, and a model that nobody serves, so that nothing is read or computed."""
    given = handle(dialect)
    call = dialect.release(Api.COMPLETIONS, TRANSFER, given)
    assert call is not None
    body = json.loads(call.body)
    leg = fields_of(dialect.decode_body(Api.COMPLETIONS, BODY, TRANSFER, given))
    named = body["kv_transfer_params"]
    assert named == leg["kv_transfer_params"]
    assert named["do_remote_prefill"] is True
    assert body["model"]
    assert call.done == {404}


def test_push_has_no_word_for_kv_that_nobody_will_fetch() -> None:
    """vLLM's push connector keeps waiting for a registration: a leg that decode refuses would only cost time."""
    assert PushDialect().release(Api.COMPLETIONS, TRANSFER, handle(PushDialect())) is None
    assert PushDialect().release(Api.COMPLETIONS, TRANSFER, None) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_has_a_dialect_of_the_suite(name: str) -> None:
    """A dialect that silently dropped out of the list would go untested."""
    dialect = load_adapter(name).dialect(pair())
    assert type(dialect) in {type(one) for one in FAMILIES}


def test_the_suite_covers_the_real_engines() -> None:
    """A dialect that silently dropped out of the list would go untested."""
    assert {"vllm", "qaic"} <= set(NAMES)
