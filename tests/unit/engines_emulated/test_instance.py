"""Whole emulated engines over HTTP: handoff between processes' worth of state, faults, death and restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from disagg.engines.emulated.settings import Role, SimplePace
from tests.support.wire import Answer, request
from tests.unit.engines_emulated.running import SETTINGS, Running, pair, running

PATH = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "tell me about the sea " * 5,
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 0,
}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Poll; the limit is far above what any of this takes."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


def prefill(up: Running, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The handle for a prompt."""
    answer = request(up.url(0), PATH, {**(body or BODY), "max_tokens": 1, "kv_transfer_params": KEEP})
    assert answer.status == 200, answer.body
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


def decode(up: Running, params: dict[str, Any], body: dict[str, Any] | None = None) -> Answer:
    return request(up.url(1), PATH, {**(body or BODY), "kv_transfer_params": params})


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    words: str = answer.json()["choices"][0]["text"]
    return words


def expected(body: dict[str, Any] | None = None) -> str:
    """The answer of one engine on its own."""
    with running(replace(SETTINGS, role=Role.NONE)) as up:
        return text(request(up.url(), PATH, body or BODY))


def all_free(up: Running, index: int) -> bool:
    state = up.state(index)
    return bool(state["free_blocks"] == state["blocks"] and not state["leases"] and not state["requests"])


def test_a_pair_says_what_one_engine_says_and_frees_everything() -> None:
    """P pins, D pulls over the side channel, P frees; the words are those of one engine."""
    with running(*pair()) as up:
        params = prefill(up)
        assert up.state(0)["leases"] == 1
        assert text(decode(up, params)) == expected()
        wait_until(lambda: all_free(up, 0) and all_free(up, 1), "free blocks")
        metrics = request(up.url(1), "/metrics").body.decode()
        tokens = params["remote_num_tokens"]
        assert f'vllm:external_prefix_cache_hits_total{{engine="0",model_name="toy"}} {tokens}.0' in metrics


def test_a_handle_used_twice_is_counted_as_late() -> None:
    """The second reader comes after the blocks were freed: 200, and a trace on P only."""
    with running(*pair(decode=replace(SETTINGS, prefix_caching=False))) as up:
        params = prefill(up)
        assert decode(up, params).status == decode(up, params).status == 200
        wait_until(lambda: up.state(0)["late_reads"] == 1, "the late notice")


def test_a_lease_ends_and_a_stale_handle_is_garbage() -> None:
    """Blocks return at the end of the lease; a handle that is used after their reuse gives 200 and wrong words."""
    tight = replace(SETTINGS, lease_s=0.05, num_blocks=32, max_model_len=512)
    with running(*pair(prefill=tight)) as up:
        params = prefill(up)
        wait_until(lambda: all_free(up, 0), "the end of the lease")
        request(up.url(0), PATH, {"prompt": "something else " * 48, "max_tokens": 250, "ignore_eos": True})
        assert text(decode(up, params)) != expected()
        assert up.state(0)["expired_leases"] == 1


def test_a_queued_request_keeps_its_lease_by_heartbeats() -> None:
    """KV of a request that waits in D's queue for longer than a lease is still there when its turn comes."""
    settings = pair(prefill=replace(SETTINGS, lease_s=1.0), decode=replace(SETTINGS, lease_s=1.0, max_num_seqs=1))
    with running(*settings, pace=SimplePace(decode_step_s=0.06)) as up:
        # D reads only when it has blocks: one long request in a pool that holds nothing beside it.
        up.instances[1].core.engine.pool.allocate(512 - 12)
        long = {"prompt": [1] * 160, "max_tokens": 30, "ignore_eos": True}
        first = threading.Thread(target=lambda: request(up.url(1), PATH, long))
        first.start()
        wait_until(lambda: up.state(1)["running"] == 1, "a busy decode engine")
        params = prefill(up)
        assert text(decode(up, params)) == expected()
        first.join()
        assert up.state(0)["expired_leases"] == 0


DEADLY: list[dict[str, Any]] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_block_ids": []},
    {"do_remote_prefill": True, "remote_block_ids": None, "remote_engine_id": "x"},
]


@pytest.mark.parametrize("params", DEADLY)
def test_a_handle_without_blocks_kills_the_decode_engine(params: dict[str, Any]) -> None:
    """Everybody is told 500, and then nobody answers; as the real one, it does not come back by itself."""
    with running(*pair()) as up:
        answer = decode(up, params)
        assert answer.status == 500
        assert "EngineCore encountered an issue" in answer.json()["error"]["message"]
        url = up.url(1)

        def gone() -> bool:
            try:
                return request(url, "/health", timeout_s=1).status == 503
            except OSError:
                return True

        wait_until(gone, "the engine's end")
        assert request(up.url(0), "/health").status == 200


WRONG: list[dict[str, Any]] = [
    {"remote_engine_id": "another-incarnation"},
    {"remote_engine_id": "unknown", "remote_port": 1},
    {"remote_block_ids": [[100_000]]},
    {"remote_host": None},
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("change", WRONG)
def test_kv_that_cannot_be_fetched_fails_or_is_recomputed(change: dict[str, Any], recompute: bool) -> None:
    """A dead or wrong peer, impossible blocks: 500 with no cause under `fail`, right words under `recompute`."""
    with running(*pair(decode=replace(SETTINGS, recompute=recompute))) as up:
        params = prefill(up) | change
        answer = decode(up, params)
        if recompute:
            assert text(answer) == expected()
        else:
            error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
            assert (answer.status, answer.json()) == (500, {"error": error})
        wait_until(lambda: all_free(up, 1), "free blocks on decode")


def test_a_failed_load_inside_a_stream_is_one_error_event_and_the_end() -> None:
    """The head has left already, so the error is told in the stream."""
    with running(*pair()) as up:
        answer = decode(up, prefill(up) | {"remote_engine_id": "another"}, {**BODY, "stream": True})
        assert answer.status == 200
        first, last = answer.events()
        assert first["error"]["code"] == 500
        assert last == "[DONE]"


def test_a_handle_without_an_address_is_parked_until_the_client_leaves() -> None:
    """Nothing ever wakes such a request; its blocks are held for as long as it waits."""
    with running(*pair()) as up:
        params = prefill(up)
        del params["remote_host"]
        with pytest.raises(TimeoutError):
            request(up.url(1), PATH, {**BODY, "kv_transfer_params": params}, timeout_s=0.3)
        wait_until(lambda: all_free(up, 1) and up.state(1)["loading"] == 0, "free blocks on decode")


def test_a_frozen_prefill_holds_decode_until_it_goes_on() -> None:
    """D waits without a limit of its own, and answers rightly in the end."""
    with running(*pair()) as up:
        assert decode(up, prefill(up)).status == 200
        params = prefill(up, {**BODY, "prompt": "another " * 20})
        request(up.url(0), "/emulated/freeze", {})
        answers: list[Answer] = []
        waiting = threading.Thread(
            target=lambda: answers.append(decode(up, params, {**BODY, "prompt": "another " * 20}))
        )
        waiting.start()
        wait_until(lambda: up.state(1)["loading"] == 1, "the load")
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
        request(up.url(0), "/emulated/thaw", {})
        waiting.join()
        assert text(answers[0]) == expected({**BODY, "prompt": "another " * 20})


def test_a_client_that_leaves_during_the_load_frees_both_sides_once_it_has_ended() -> None:
    """Decode keeps the blocks as long as the transfer may write into them, then everything comes home."""
    with running(*pair()) as up:
        assert decode(up, prefill(up)).status == 200
        other = {**BODY, "prompt": "another " * 20}
        params = prefill(up, other)
        request(up.url(0), "/emulated/freeze", {})
        with pytest.raises(TimeoutError):
            request(up.url(1), PATH, {**other, "kv_transfer_params": params}, timeout_s=0.3)
        wait_until(lambda: up.state(1)["requests"] == 0, "the client's leaving")
        assert not all_free(up, 1)
        request(up.url(0), "/emulated/thaw", {})
        wait_until(lambda: all_free(up, 0) and all_free(up, 1), "free blocks")


def test_collected_blocks_go_to_a_prefill_that_waits_for_them() -> None:
    """The reader's notice wakes the engine: no lease has to end and no other request has to come."""
    with running(*pair(prefill=replace(SETTINGS, num_blocks=32, max_model_len=512))) as up:
        first, second = ({**BODY, "prompt": [n] * 300} for n in (1, 2))
        params = prefill(up, first)
        handles: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: handles.append(prefill(up, second)))
        waiting.start()
        wait_until(lambda: up.state(0)["waiting"] == 1, "the second prompt")
        assert decode(up, params, first).status == 200
        waiting.join(timeout=20)
        assert handles


def test_a_restart_on_the_same_ports_is_another_engine() -> None:
    """New incarnation, empty cache: old handles fail, new ones work at once, over the same address."""
    with running(*pair()) as up:
        old = prefill(up)
        assert decode(up, old).status == 200
        stale = prefill(up, {**BODY, "prompt": "never read " * 9})
        url, before = up.url(0), up.state(0)["engine_id"]
        request(url, "/emulated/restart", {})

        def back() -> bool:
            try:
                return bool(request(url, "/emulated/state").json()["engine_id"] != before)
            except OSError:
                return False

        wait_until(back, "the new incarnation")
        assert up.url(0) == url
        assert decode(up, stale, {**BODY, "prompt": "never read " * 9}).status == 500
        assert text(decode(up, prefill(up))) == expected()


def test_a_request_that_decode_refuses_lets_prefills_kv_go() -> None:
    """A 400 on D must not leave P's blocks to the lease."""
    with running(*pair()) as up:
        params = prefill(up)
        assert decode(up, params, {**BODY, "temperature": 9}).status == 400
        wait_until(lambda: all_free(up, 0), "free blocks on prefill")


def test_without_a_connector_the_parameters_have_no_effect() -> None:
    """Role none: no handle comes back, and remote KV is not asked for."""
    with running(replace(SETTINGS, role=Role.NONE)) as up:
        answer = request(up.url(), PATH, {**BODY, "kv_transfer_params": KEEP})
        assert answer.json()["kv_transfer_params"] is None
        assert request(up.url(), PATH, {**BODY, "kv_transfer_params": {"do_remote_prefill": True}}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_what_it_held(stream: bool) -> None:
    """Disconnects in the middle of decoding end the sequence, streamed or not."""
    with running(SETTINGS, pace=SimplePace(decode_step_s=0.02)) as up:
        parts = urlsplit(up.url())
        client = http.client.HTTPConnection(str(parts.hostname), parts.port)
        body = json.dumps({**BODY, "max_tokens": 1000, "stream": stream})
        client.request("POST", PATH, body, {"content-type": "application/json"})
        wait_until(lambda: up.state()["running"] == 1, "the request")
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_RDWR)
        client.close()
        wait_until(lambda: up.state()["running"] == 0 and all_free(up, 0), "its end")


def test_faults_hit_as_many_requests_as_told_and_can_be_cleared() -> None:
    """Status, missing handle and their counts; DELETE ends them."""
    with running(SETTINGS) as up:
        request(up.url(), "/emulated/faults", {"status": 503, "requests": 2})
        assert [request(up.url(), PATH, BODY).status for _ in range(3)] == [503, 503, 200]
        request(up.url(), "/emulated/faults", {"no_handle": True})
        assert request(up.url(), PATH, {**BODY, "kv_transfer_params": KEEP}).json()["kv_transfer_params"] is None
        request(up.url(), "/emulated/faults", method="DELETE")
        assert request(up.url(), PATH, {**BODY, "kv_transfer_params": KEEP}).json()["kv_transfer_params"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 40])
def test_an_answer_can_be_cut_at_a_byte(stream: bool, at: int) -> None:
    """The head and exactly so many bytes of the body arrive, and then the connection is gone."""
    with running(SETTINGS) as up:
        request(up.url(), "/emulated/faults", {"close_at_byte": at})
        parts = urlsplit(up.url())
        client = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
        client.request("POST", PATH, json.dumps({**BODY, "stream": stream}), {"content-type": "application/json"})
        answer = client.getresponse()
        assert answer.status == 200
        got = b""
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            while piece := answer.read(1):
                got += piece
        assert len(got) == at
        client.close()
        wait_until(lambda: all_free(up, 0), "free blocks")


def test_an_answer_can_fall_silent_at_a_byte() -> None:
    """The bytes before it arrive, the connection stays, and the engine is free once the client has left."""
    with running(SETTINGS) as up:
        request(up.url(), "/emulated/faults", {"hang_at_byte": 30})
        parts = urlsplit(up.url())
        with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=20) as client:
            body = json.dumps({**BODY, "stream": True}).encode()
            head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            client.sendall(head % (PATH.encode(), len(body)) + body)
            got = b""
            while not got.endswith(b"\r\n1e\r\n" + got[-32:-2] + b"\r\n") or b"data: " not in got:
                got += client.recv(4096)
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert up.state()["requests"] == 1
        wait_until(lambda: all_free(up, 0), "free blocks")


@pytest.mark.parametrize("body", [b"{", b'{"nonsense": 1}', b'{"status": 200}', b'{"delay_s": -1}'])
def test_a_wrong_fault_is_refused(body: bytes) -> None:
    """A test that misspells its fault must not pass by luck."""
    with running(SETTINGS) as up:
        assert request(up.url(), "/emulated/faults", body).status == 400
        assert request(up.url(), "/emulated/nothing", {}).status == 400


def test_a_crash_ends_without_an_answer() -> None:
    """Requests that are under way see a closed connection, as when a process is killed."""
    with running(SETTINGS, pace=SimplePace(decode_step_s=0.05)) as up:
        ended: list[Exception] = []

        def ask() -> None:
            try:
                request(up.url(), PATH, {**BODY, "max_tokens": 500})
            except (OSError, http.client.HTTPException) as error:
                ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: up.state()["running"] == 1, "the request")
        request(up.url(), "/emulated/crash", {})
        asking.join()
        assert ended


def test_an_engine_whose_steps_end_by_a_bug_is_dead_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an engine that computes nothing any more."""

    def commit(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("disagg.engines.emulated.engine.Engine.commit", commit)
    with running(SETTINGS) as up:
        answer = request(up.url(0), PATH, BODY)
        assert answer.status == 500, answer.body
