"""Faults on demand: each example of the guide does what the guide says."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from disagg.engines.emulated.admin import ACTIONS
from disagg.engines.emulated.faults import FaultBox, Faults, Match, read_faults
from disagg.engines.emulated.settings import Role, SimplePace
from disagg.errors import BadRequestError
from disagg.http.messages import Request
from tests.support.wire import Answer, request
from tests.unit.engines_emulated.running import SETTINGS, Running, pair, running
from tests.unit.engines_emulated.test_instance import BODY, KEEP, PATH, all_free, decode, prefill, text, wait_until

GUIDE = (Path(__file__).parents[3] / "docs/guides/emulate.md").read_text()
EXAMPLES: list[dict[str, Any]] = [json.loads(row) for row in re.findall(r"^\| `(\{.*?\})` \|", GUIDE, re.MULTILINE)]
SHORT = replace(SETTINGS, handshake_timeout_s=0.3)
FIRST_KEYS = {
    *("status", "delay_s", "silent", "chunk_delay_s", "close_at_byte", "reset_at_byte", "hang_at_byte"),
    *("content_type", "not_json", "usage", "no_handle", "handle", "transfer_s", "transfer_bytes_per_s", "transfer"),
    "notice",
}


def examples(first: str) -> list[Any]:
    """The guide's faults that begin with this key."""
    found = [example for example in EXAMPLES if next(iter(example)) == first]
    assert found, first
    return [pytest.param(example, id=json.dumps(example)) for example in found]


def set_fault(url: str, fault: Any) -> None:
    assert request(url, "/emulated/faults", fault).status == 200


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    with running(replace(SETTINGS, role=Role.NONE)) as up:
        yield up


@pytest.fixture
def one(engine: Running) -> Iterator[Running]:
    yield engine
    request(engine.url(), "/emulated/faults", method="DELETE")


@pytest.fixture
def two() -> Iterator[Running]:
    with running(*pair(SHORT, SHORT)) as up:
        yield up


@contextmanager
def opened(url: str, body: dict[str, Any], limit_s: float = 20) -> Iterator[http.client.HTTPConnection]:
    """A request that was sent and not read."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=limit_s)
    connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()


def all_that_comes(connection: http.client.HTTPConnection) -> bytes:
    """Bytes until nothing more comes within the connection's limit; an end fails the test."""
    assert connection.sock is not None
    got = b""
    while True:
        try:
            piece = connection.sock.recv(65536)
        except TimeoutError:
            return got
        assert piece, f"the connection has ended after {got!r}"
        got += piece


def test_the_guide_is_whole() -> None:
    """Every key of a fault has an example, every example is a fault, and every action is there."""
    keys = {key for example in EXAMPLES for key in example}
    assert keys == set(Faults.__struct_fields__)
    assert {next(iter(example)) for example in EXAMPLES} == FIRST_KEYS
    for example in EXAMPLES:
        read_faults(json.dumps(example).encode())
    assert set(re.findall(r"^\| `([a-z-]+)` \|", GUIDE, re.MULTILINE)) == set(ACTIONS)


# Which requests.


def _asks(path: str = PATH, body: bytes = b"{}", **headers: str) -> Request:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request("POST", path, path, lines, body)


def test_a_match_needs_all_that_it_names() -> None:
    """Path, body and header; what is not named does not matter."""
    match = Match("/v1/comp", "sea", "x-a: 1")
    assert match.hits(_asks(body=b"the sea", **{"x-a": "1"}))
    assert not match.hits(_asks("/v1/chat/completions", b"the sea", **{"x-a": "1"}))
    assert not match.hits(_asks(body=b"the sun", **{"x-a": "1"}))
    assert not match.hits(_asks(body=b"the sea", **{"x-a": "2"}))
    assert Match().hits(_asks())


def test_counts_and_times_of_faults() -> None:
    """After so many, for so many, for so long; the first that matches counts, then the next."""
    now = [0.0]
    box = FaultBox((), lambda: now[0])
    box.set((Faults(status=500, after=1, requests=2), Faults(status=503, for_s=5)))
    assert [box.take(_asks()).status for _ in range(4)] == [503, 500, 500, 503]
    now[0] = 6.0
    assert box.take(_asks()).status == 0


@pytest.mark.parametrize(
    "text",
    ['{"stauts": 1}', '{"status": 200}', '{"delay_s": -1}', "[1]", "{", '{"match": {"header": "x"}}'],
)
def test_what_is_no_fault(text: str) -> None:
    """Unknown keys, and values that make no sense."""
    with pytest.raises(BadRequestError):
        read_faults(text.encode())


@pytest.mark.parametrize("fault", examples("status"))
def test_a_status(fault: dict[str, Any], one: Running) -> None:
    """The status for those who match, with its body and headers; others are served."""
    set_fault(one.url(), fault)

    def post(**headers: str) -> Answer:
        return request(one.url(), PATH, BODY, headers=headers)

    match, after = fault.get("match", {}), fault.get("after", 0)
    assert [post().status for _ in range(after)] == [200] * after
    if "path" in match:
        assert post().status == 200
        answer = request(one.url(), "/v1/chat/completions", {"messages": []})
    elif "header" in match:
        assert post().status == 200
        answer = post(**{"x-request-id": "mine"})
    else:
        answer = post()
    assert answer.status == fault["status"]
    if "body" in fault:
        assert answer.body.decode() == fault["body"]
        assert answer.headers["content-type"] == fault["content_type"]
    else:
        assert answer.json()["error"]["code"] == fault["status"]
    assert answer.headers.get("retry-after") == (str(fault["retry_after_s"]) if "retry_after_s" in fault else None)
    if "for_s" in fault or "requests" in fault:
        wait_until(lambda: post().status == 200, "the end of the fault")


# Answers.


@pytest.mark.parametrize("fault", examples("delay_s"))
def test_a_late_head(fault: dict[str, Any], one: Running) -> None:
    """The answer is the true one, and not before its time."""
    set_fault(one.url(), fault)
    begun = time.monotonic()
    assert request(one.url(), PATH, BODY).status == 200
    assert time.monotonic() - begun >= fault["delay_s"]


@pytest.mark.parametrize("fault", [*examples("silent"), *examples("hang_at_byte")])
def test_no_end(fault: dict[str, Any], one: Running) -> None:
    """Nothing, or so many bytes, and then silence on an open connection; the client's leaving ends it."""
    set_fault(one.url(), fault)
    with opened(one.url(), {**BODY, "stream": True}, 0.2) as connection:
        got = all_that_comes(connection)
        if "silent" in fault:
            assert got == b""
        else:
            assert b"\r\n14\r\n" in got  # a chunk of twenty bytes
    wait_until(lambda: one.state()["requests"] == 0, "the end of the request")


@pytest.mark.parametrize("fault", examples("chunk_delay_s"))
def test_slow_pieces(fault: dict[str, Any], one: Running) -> None:
    """The true stream, with a pause before each event."""
    set_fault(one.url(), fault)
    begun = time.monotonic()
    events = request(one.url(), PATH, {**BODY, "stream": True}).events()
    assert events[-1] == "[DONE]"
    assert time.monotonic() - begun >= BODY["max_tokens"] * fault["chunk_delay_s"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [*examples("close_at_byte"), *examples("reset_at_byte")])
def test_a_cut_answer(fault: dict[str, Any], stream: bool, one: Running) -> None:
    """So many bytes of the body, and no more: an end that no client takes for one, or a reset."""
    set_fault(one.url(), fault)
    kind = ConnectionResetError if "reset_at_byte" in fault else http.client.IncompleteRead
    with opened(one.url(), {**BODY, "stream": stream}) as connection:
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(answer.read1(20)) == 20
        with pytest.raises(kind):
            answer.read()


@pytest.mark.parametrize("fault", [*examples("content_type"), *examples("not_json"), *examples("usage")])
def test_a_changed_answer(fault: dict[str, Any], one: Running) -> None:
    """Another type, another body, or other usage, whole and streamed."""
    true = request(one.url(), PATH, BODY).json()
    set_fault(one.url(), fault)
    answer = request(one.url(), PATH, BODY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = request(one.url(), PATH, {**BODY, **options})
    assert (answer.status, streamed.status) == (200, 200)
    if "content_type" in fault:
        assert answer.headers["content-type"] == streamed.headers["content-type"] == fault["content_type"]
        assert text(answer) == true["choices"][0]["text"]
    elif "not_json" in fault:
        assert answer.body.startswith(b"<html>")
        assert b"<html>" in streamed.body
        assert answer.headers["content-type"] == "application/json"
    else:
        last = streamed.events()[-2]
        for usage in (answer.json().get("usage"), last.get("usage")):
            assert usage is None if fault["usage"] == "missing" else usage["prompt_tokens"] != 50


# Handoffs.


@pytest.mark.parametrize("fault", [*examples("no_handle"), *examples("handle")])
def test_a_handle_that_is_not_right(fault: dict[str, Any], two: Running) -> None:
    """What prefill returns, and whether it keeps the KV."""
    true = prefill(two)
    decode(two, true)
    wait_until(lambda: all_free(two, 0), "free blocks")
    set_fault(two.url(0), fault)
    answer = request(two.url(0), PATH, {**BODY, "max_tokens": 1, "kv_transfer_params": KEEP}).json()
    params = answer["kv_transfer_params"]
    assert two.state(0)["leases"] == (0 if "no_handle" in fault else 1)
    match fault.get("handle"):
        case "partial":
            assert set(true) - set(params) == {"remote_engine_id"}
        case "foreign":
            assert params["remote_engine_id"] != true["remote_engine_id"]
            assert decode(two, params).status == 500
        case "empty":
            assert params["remote_block_ids"] == []
        case _:
            assert params is None


@pytest.fixture(scope="module")
def expected(engine: Running) -> str:
    return text(request(engine.url(), PATH, BODY))


@pytest.mark.parametrize("fault", [*examples("transfer_bytes_per_s"), *examples("transfer_s")[:1]])
def test_a_slow_load(fault: dict[str, Any], two: Running, expected: str) -> None:
    """The true words, later."""
    params = prefill(two)
    set_fault(two.url(1), fault)
    begun = time.monotonic()
    assert text(decode(two, params)) == expected
    assert time.monotonic() - begun >= 0.1


def test_a_load_that_outlasts_the_lease_reads_what_is_there(expected: str) -> None:
    """P19: 200 and wrong words, since the blocks belong to somebody else by then."""
    tight = replace(SHORT, lease_s=0.2, num_blocks=32, max_model_len=512)
    with running(*pair(prefill=tight, decode=SHORT)) as up:
        params = prefill(up)
        set_fault(up.url(1), {"transfer_s": 0.8})
        answers: list[Answer] = []
        reader = threading.Thread(target=lambda: answers.append(decode(up, params)))
        reader.start()
        # Decode's heartbeats come later than this lease ends, which is shorter than decode believes.
        wait_until(lambda: up.state(0)["expired_leases"] == 1, "the end of the lease")
        request(up.url(0), PATH, {"prompt": "something else " * 48, "max_tokens": 250, "ignore_eos": True})
        reader.join(timeout=20)
        assert text(answers[0]) != expected


@pytest.mark.parametrize("fault", examples("transfer"))
def test_a_load_that_goes_wrong(fault: dict[str, Any], two: Running, expected: str) -> None:
    """Lost is an error, half a load hangs until the client leaves, wrong content gives wrong words."""
    params = prefill(two)
    set_fault(two.url(1), fault)
    if fault["transfer"] == "half":
        with opened(two.url(1), {**BODY, "kv_transfer_params": params}):
            wait_until(lambda: two.state(1)["loading"] == 1, "the load")
        wait_until(lambda: all_free(two, 1), "free blocks")
        return
    answer = decode(two, params)
    if fault["transfer"] == "lost":
        assert answer.status == 500
    else:
        assert text(answer) != expected


@pytest.mark.parametrize("fault", examples("notice"))
def test_a_notice_that_goes_wrong(fault: dict[str, Any], expected: str) -> None:
    """P22: the words are right in any case; prefill frees at the end of its lease, once, or later."""
    with running(*pair(replace(SHORT, lease_s=1.0), SHORT)) as up:
        params = prefill(up)
        set_fault(up.url(1), fault)
        assert text(decode(up, params)) == expected
        wait_until(lambda: all_free(up, 0), "free blocks")
        expired, late = up.state(0)["expired_leases"], up.state(0)["late_reads"]
        if fault["notice"] == "lost":
            assert expired == 1
        elif fault["notice"] == "duplicate":
            wait_until(lambda: up.state(0)["late_reads"] == 1, "the second notice")
        else:
            assert (expired, late) == (0, 0)


def test_blocks_that_are_free_too_early(two: Running) -> None:
    """P07: another request gets them while the transfer still writes, and only its text tells."""
    (fault,) = [example for example in EXAMPLES if example.get("free_early")]
    core = two.instances[1].core
    core.engine.pool.allocate(SHORT.num_blocks - 12)
    params = prefill(two)
    set_fault(two.url(1), fault)
    other = {"prompt": [400] * 150, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    with running(replace(SHORT, role=Role.NONE)) as alone:
        right = text(request(alone.url(), PATH, other))
    with opened(two.url(1), {**BODY, "kv_transfer_params": params}):
        wait_until(lambda: two.state(1)["loading"] == 1, "the load")
    wait_until(lambda: two.state(1)["loading"] == 0, "the abort")
    core.driver.pace = SimplePace(decode_step_s=0.05)
    assert text(request(two.url(1), PATH, other)) != right


# Whole engines.


def action(up: Running, name: str, body: object = None) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    assert request(up.url(), f"/emulated/{name}", data, method="POST").status == 200


def silent(up: Running, path: str) -> bool:
    try:
        request(up.url(), path, timeout_s=0.1)
    except TimeoutError:
        return True
    return False


def refused(up: Running) -> bool:
    parts = urlsplit(up.url())
    try:
        socket.create_connection((str(parts.hostname), parts.port or 0), timeout=1).close()
    except OSError:
        return True
    return False


@pytest.fixture
def own() -> Iterator[Running]:
    with running(replace(SHORT, role=Role.NONE)) as up:
        yield up


def test_a_frozen_process_accepts_and_says_nothing(own: Running) -> None:
    """Not even health answers until it is thawed, by itself after a time."""
    action(own, "freeze", {"for_s": 0.5})
    assert silent(own, "/health")
    wait_until(lambda: not silent(own, "/health"), "the thaw")
    action(own, "freeze")
    assert silent(own, "/v1/models")
    action(own, "thaw")
    assert request(own.url(), PATH, BODY).status == 200


def test_a_frozen_engine_has_a_healthy_door(own: Running) -> None:
    """Health says 200, requests hang."""
    action(own, "freeze-core")
    assert request(own.url(), "/health").status == 200
    with opened(own.url(), BODY, 0.1) as connection, pytest.raises(TimeoutError):
        connection.getresponse()
    action(own, "thaw")
    assert request(own.url(), PATH, BODY).status == 200


def test_a_closed_port_keeps_the_engine(two: Running, expected: str) -> None:
    """Connections are refused, KV stays, and it is the same incarnation afterwards."""
    params = prefill(two)
    action(two, "refuse", {"for_s": 0.3})
    wait_until(lambda: refused(two), "the refusal")
    assert text(decode(two, params)) == expected
    wait_until(lambda: not refused(two), "the open door")
    assert two.state(0)["engine_id"] == params["remote_engine_id"]


def test_a_restart_is_another_incarnation(own: Running) -> None:
    """On the same port, after a while in which nobody is there."""
    before = own.state()["engine_id"]
    action(own, "restart", {"for_s": 0.2})
    wait_until(lambda: refused(own), "the end")
    wait_until(lambda: not refused(own), "the start")
    assert own.state()["engine_id"] != before


@pytest.mark.parametrize("name", ["crash", "kill-core"])
def test_an_engine_that_ends(name: str, own: Running) -> None:
    """At once, or with last words: those who wait are told, and health is 503."""
    answers: list[int] = []

    def wait() -> None:
        try:
            answers.append(request(own.url(), PATH, BODY).status)
        except (OSError, http.client.HTTPException):
            answers.append(0)

    action(own, "freeze-core")
    caller = threading.Thread(target=wait)
    caller.start()
    wait_until(lambda: own.state()["requests"] == 1, "the request")
    action(own, name, {"for_s": 0.5})
    if name == "kill-core":
        assert request(own.url(), "/health").status == 503
    caller.join(timeout=20)
    assert answers == [500 if name == "kill-core" else 0]
    wait_until(lambda: refused(own), "the end")


def test_an_action_that_there_is_not(own: Running) -> None:
    """It is refused with the list of those that there are; so is a duration that is none."""
    answer = request(own.url(), "/emulated/explode", b"", method="POST")
    assert answer.status == 400
    assert "kill-core" in answer.json()["error"]["message"]
    assert request(own.url(), "/emulated/freeze", {"for_s": -1}).status == 400
