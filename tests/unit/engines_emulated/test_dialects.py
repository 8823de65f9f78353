"""Handoff dialects: the legs that the router's dialects write, run on pairs of emulated engines."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
import pytest

from disagg.engines.base import Api, Dialect, Peer, Transfer
from disagg.engines.emulated.settings import DialectName, EngineSettings, Role
from disagg.engines.sglang.dialect import BootstrapDialect
from disagg.engines.vllm.dialect_lmcache import LMCacheDialect
from disagg.engines.vllm.dialect_mooncake import MooncakeDialect
from disagg.engines.vllm.dialect_push import PushDialect
from tests.support.wire import Answer, metric, request
from tests.unit.engines_emulated.running import SETTINGS, Running, pair, running
from tests.unit.engines_emulated.test_instance import wait_until

BODY: dict[str, Any] = {"prompt": list(range(300, 350)), "max_tokens": 6, "ignore_eos": True, "temperature": 0}
DIALECTS: dict[DialectName, Dialect] = {
    "nixl-push": PushDialect(),
    "mooncake": MooncakeDialect(),
    "lmcache": LMCacheDialect(),
    "sglang": BootstrapDialect(),
}
TOGETHER: list[DialectName] = ["nixl-push", "mooncake", "sglang"]


def settings(name: DialectName, **fields: Any) -> tuple[EngineSettings, EngineSettings]:
    base = replace(SETTINGS, dialect=name, handshake_timeout_s=2.0, **fields)
    return pair(base, base)


def peer(up: Running, index: int) -> Peer:
    where, engine = up.instances[index].addresses, up.instances[index].settings
    return Peer(engine.engine_id, "127.0.0.1", where.side_channel_port, where.side_channel_port, where.bootstrap_port)


def legs(up: Running, name: DialectName, body: dict[str, Any]) -> tuple[bytes, bytes, str]:
    """Both bodies of a new transfer, and its key."""
    dialect = DIALECTS[name]
    prefill = peer(up, 0)
    if url := dialect.query(prefill):
        parts = urlsplit(url)
        prefill = dialect.learn(prefill, request(f"http://{parts.netloc}", parts.path).body)
    transfer = Transfer(uuid4().hex, prefill, peer(up, 1))
    raw = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in body.items()}
    sent = dialect.prefill_body(Api.COMPLETIONS, raw, transfer)
    return sent, dialect.decode_body(Api.COMPLETIONS, raw, transfer, None), transfer.key


def start(up: Running, index: int, body: bytes, key: str) -> tuple[threading.Thread, list[Answer]]:
    """Send a leg and do not wait for its answer."""
    answers: list[Answer] = []

    def send() -> None:
        answers.append(request(up.url(index), Api.COMPLETIONS, body, headers={"x-request-id": key}))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, answers


def ended(leg: tuple[threading.Thread, list[Answer]]) -> Answer:
    leg[0].join(timeout=30)
    return leg[1][0]


def words(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    text: str = answer.json()["choices"][0]["text"]
    return text


def clean(up: Running, index: int) -> bool:
    state = up.state(index)
    return bool(state["free_blocks"] == state["blocks"] and not state["leases"] and not state["requests"])


@pytest.fixture(scope="module")
def expected() -> str:
    with running(replace(SETTINGS, role=Role.NONE)) as up:
        return words(request(up.url(), Api.COMPLETIONS, BODY))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", TOGETHER)
def test_whichever_leg_comes_first(name: DialectName, first: int, expected: str) -> None:
    """Decode waits for prefill's KV, and the KV waits for decode; the words are one engine's; all blocks return."""
    with running(*settings(name)) as up:
        one, two, key = legs(up, name, BODY)
        bodies = (one, two)
        early = start(up, first, bodies[first], key)
        wait_until(lambda: bool(early[1]) or up.state(first)["requests"] == 1, "the first leg")
        if first == 0 and name != "sglang":
            ended(early)
            assert up.state(0)["leases"] == 1
        late = start(up, 1 - first, bodies[1 - first], key)
        prefill, decode = ended(early if first == 0 else late), ended(late if first == 0 else early)
        assert prefill.status == 200
        DIALECTS[name].read_handle(prefill.body)
        assert words(decode) == expected
        assert decode.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
        wait_until(lambda: clean(up, 0) and clean(up, 1), "free blocks")
        page = request(up.url(1), "/metrics").body.decode()
        assert metric(page, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 50


def test_kv_sent_ahead_is_found_by_its_tokens(expected: str) -> None:
    """LMCache: decode's leg names nothing; whole blocks come from the buffer, the rest is computed."""
    with running(*settings("lmcache")) as up:
        prefill, decode, key = legs(up, "lmcache", BODY)
        assert words(ended(start(up, 0, prefill, key)))
        assert clean(up, 0)
        assert words(ended(start(up, 1, decode, key))) == expected
        page = request(up.url(1), "/metrics").body.decode()
        assert metric(page, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 48
        # Other words are not found.
        other = {**BODY, "prompt": list(range(400, 450))}
        request(up.url(1), Api.COMPLETIONS, other)
        assert metric(request(up.url(1), "/metrics").body.decode(), "vllm:external_prefix_cache_hits_total") == 48


def test_the_first_token_of_lmcache_can_be_asked_for() -> None:
    """With ret_first_tok the answer's parameters hold what prefill sampled."""
    with running(*settings("lmcache")) as up:
        port = up.instances[1].addresses.side_channel_port
        spec = {"req_id": "r", "receiver_host": "127.0.0.1", "receiver_init_port": port, "receiver_alloc_port": port}
        params = {"disagg_spec": spec, "ret_first_tok": True}
        body = {**BODY, "max_tokens": 1, "return_token_ids": True, "kv_transfer_params": params}
        answer = request(up.url(0), Api.COMPLETIONS, body).json()
        assert answer["kv_transfer_params"] == {"first_tok": answer["choices"][0]["token_ids"][0]}


def test_mooncake_drops_kv_of_a_prefill_that_stopped() -> None:
    """P26: prefill ended by a stop, so nothing comes; decode waits its time and fails, and no block is kept."""
    with running(*settings("mooncake", meeting_s=0.3)) as up:
        prefill, decode, key = legs(up, "mooncake", BODY)
        stopped = json.loads(prefill)
        forced = {"stop_token_ids": [300], "allowed_token_ids": [300], "ignore_eos": False}
        answer = ended(start(up, 0, json.dumps({**stopped, **forced}).encode(), key))
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert clean(up, 0)
        assert ended(start(up, 1, decode, key)).status == 500
        wait_until(lambda: clean(up, 1), "free blocks")


@pytest.mark.parametrize("name", ["nixl-push", "mooncake"])
def test_kv_that_nobody_asks_for_is_let_go_in_time(name: DialectName) -> None:
    """Decode never comes: the blocks return when the registration's time is over, and that is counted."""
    with running(*settings(name, meeting_s=0.2)) as up:
        prefill, _, key = legs(up, name, BODY)
        assert ended(start(up, 0, prefill, key)).status == 200
        wait_until(lambda: clean(up, 0), "the end of the time")
        assert up.state(0)["expired_leases"] == 1


def test_a_refused_decode_leg_of_a_push_leaves_the_writer_waiting() -> None:
    """As seen with vLLM 0.32: the blocks return only when the registration's time is over."""
    with running(*settings("nixl-push", meeting_s=1.0)) as up:
        prefill, decode, key = legs(up, "nixl-push", BODY)
        assert ended(start(up, 0, prefill, key)).status == 200
        wrong = json.dumps({**json.loads(decode), "model": "nope"}).encode()
        assert ended(start(up, 1, wrong, key)).status == 404
        wait_until(lambda: clean(up, 0), "the end of the time")
        assert up.state(0)["expired_leases"] == 1


def test_a_refused_decode_leg_lets_the_kv_go() -> None:
    """Decode's API layer tells prefill, whether its KV is there already or not."""
    name: DialectName = "mooncake"
    with running(*settings(name)) as up:
        for refused_first in (False, True):
            prefill, decode, key = legs(up, name, BODY)
            wrong = json.dumps({**json.loads(decode), "model": "nope"}).encode()
            if refused_first:
                assert ended(start(up, 1, wrong, key)).status == 404
                wait_until(lambda: bool(up.instances[0].core.engine.meetings._forgotten), "the word")
            assert ended(start(up, 0, prefill, key)).status == 200
            if not refused_first:
                assert up.state(0)["leases"] == 1
                assert ended(start(up, 1, wrong, key)).status == 404
            wait_until(lambda: clean(up, 0), "free blocks")


def test_push_pairs_legs_by_their_own_ids_alone(expected: str) -> None:
    """Legs with different ids do not meet: decode waits in vain although the KV is there."""
    with running(*settings("nixl-push", meeting_s=0.5)) as up:
        prefill, decode, key = legs(up, "nixl-push", BODY)
        early = start(up, 1, decode, "another")
        assert ended(start(up, 0, prefill, key)).status == 200
        assert ended(early).status == 500
        assert expected


@pytest.mark.parametrize(
    ("name", "missing"),
    [("nixl-push", "remote_request_id"), ("mooncake", "transfer_id"), ("mooncake", "remote_bootstrap_addr")],
)
def test_parameters_that_are_not_whole_kill_the_engine(name: DialectName, missing: str) -> None:
    """As the real scheduler, which asserts."""
    with running(*settings(name)) as up:
        _, decode, key = legs(up, name, BODY)
        body = json.loads(decode)
        del body["kv_transfer_params"][missing]
        assert ended(start(up, 1, json.dumps(body).encode(), key)).status == 500
        assert up.instances[1]._core is None or up.instances[1].core.dead


def test_a_restarted_prefill_engine_is_another(expected: str) -> None:
    """P12: with the old engine's id decode gets nothing; asked anew the bootstrap server names the new one."""
    with running(*settings("mooncake", meeting_s=0.5)) as up:
        old = legs(up, "mooncake", BODY)
        up.call(up.instances[0].restart())
        assert ended(start(up, 1, old[1], old[2])).status == 500
        prefill, decode, key = legs(up, "mooncake", BODY)
        early = start(up, 1, decode, key)
        assert ended(start(up, 0, prefill, key)).status == 200
        assert words(ended(early)) == expected


def test_a_dead_prefill_engine_fails_those_who_wait() -> None:
    """P13: decode's legs end at once when the connection breaks, and decode goes on serving."""
    with running(*settings("nixl-push")) as up:
        _, decode, key = legs(up, "nixl-push", BODY)
        waiting = start(up, 1, decode, key)
        wait_until(lambda: up.state(1)["loading"] == 1, "a leg that waits")
        wait_until(lambda: bool(up.instances[0].core.engine.meetings._asked), "its question")
        up.call(up.instances[0].stop())
        assert ended(waiting).status == 500
        assert request(up.url(1), Api.COMPLETIONS, BODY).status == 200


@contextmanager
def open_request(url: str, body: bytes, key: str) -> Iterator[http.client.HTTPConnection]:
    """A request whose client leaves at the end of the block."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    connection.request("POST", str(Api.COMPLETIONS), body, {"content-type": "application/json", "x-request-id": key})
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("name", TOGETHER)
def test_a_client_that_leaves_decode_frees_both(name: DialectName) -> None:
    """P09: decode's question is withdrawn, and KV that comes later is not kept for it."""
    with running(*settings(name, meeting_s=20.0)) as up:
        prefill, decode, key = legs(up, name, BODY)
        meetings = up.instances[0].core.engine.meetings
        with open_request(up.url(1), decode, key):
            wait_until(lambda: bool(meetings._asked), "the question")
        wait_until(lambda: clean(up, 1), "free blocks on decode")
        wait_until(lambda: not meetings._asked, "the withdrawal")
        if name != "sglang":
            assert ended(start(up, 0, prefill, key)).status == 200
        wait_until(lambda: clean(up, 0), "free blocks on prefill")


# SGLang's own.


def test_sglang_counts_prefill_s_token() -> None:
    """P28: a limit of one token is one token, which decode delivers; of two, two."""
    for limit in (1, 2):
        with running(*settings("sglang")) as up:
            prefill, decode, key = legs(up, "sglang", {**BODY, "max_tokens": limit})
            early = start(up, 1, decode, key)
            one = ended(start(up, 0, prefill, key)).json()
            answer = ended(early).json()
            assert one["usage"]["completion_tokens"] == 1
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["choices"][0]["text"].startswith(one["choices"][0]["text"])
            assert answer["choices"][0]["finish_reason"] == "length"


def test_a_batch_has_a_room_for_each(expected: str) -> None:
    """A list of prompts meets in as many rooms."""
    with running(*settings("sglang")) as up:
        prefill, decode, key = legs(up, "sglang", {**BODY, "prompt": [BODY["prompt"], [1, 2, 3]]})
        early = start(up, 1, decode, key)
        assert ended(start(up, 0, prefill, key)).status == 200
        choices = ended(early).json()["choices"]
        assert len(choices) == 2
        assert choices[0]["text"] == expected


def test_sglang_prefill_waits_for_decode_and_gives_up() -> None:
    """Without its partner prefill computes nothing and fails after its time."""
    with running(*settings("sglang", meeting_s=0.2)) as up:
        prefill, _, key = legs(up, "sglang", BODY)
        assert ended(start(up, 0, prefill, key)).status == 500
        assert clean(up, 0)


def test_an_aborted_prefill_leaves_decode_waiting_until_it_is_told() -> None:
    """P04: decode's slot is held; abort_request by the body's rid frees it."""
    with running(*settings("sglang", meeting_s=20.0)) as up:
        _, decode, key = legs(up, "sglang", BODY)
        waiting = start(up, 1, decode, key)
        wait_until(lambda: up.state(1)["loading"] == 1, "a slot that is held")
        assert request(up.url(1), "/abort_request", {"rid": key}).status == 200
        assert ended(waiting).json()["choices"][0]["finish_reason"] == "abort"
        wait_until(lambda: clean(up, 1), "free blocks")


def test_sglang_s_own_endpoints(expected: str) -> None:
    """/generate with ids, whole and streamed; load, info; and no path of vLLM's."""
    with running(replace(SETTINGS, dialect="sglang", role=Role.NONE)) as up:
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": BODY["prompt"], "sampling_params": sampling}
        answer = request(up.url(), "/generate", body).json()
        assert answer["text"] == expected
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        chunks = request(up.url(), "/generate", {**body, "stream": True}).events()
        assert (chunks[-2]["text"], chunks[-1]) == (expected, "[DONE]")
        assert request(up.url(), "/get_load").json()[0]["num_reqs"] == 0
        assert request(up.url(), "/get_server_info").json()["disaggregation_mode"] == "null"
        assert request(up.url(), "/load").status == 404
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        events = request(up.url(), "/v1/chat/completions", chat).events()
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-2]["choices"][0]["finish_reason"] in {"length", "stop"}
    with running(*settings("sglang")) as up:
        refused = request(up.url(1), Api.COMPLETIONS, BODY)
        assert refused.status == 400
        assert "bootstrap room" in refused.json()["message"]
