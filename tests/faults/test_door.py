"""What is refused at the door, and how; what is shown about the state behind it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from disagg.router.fleet import State
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Call, rig


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"", 400, None),
        (b"[]", 400, None),
        (b'"text"', 400, None),
        (b'{"model":"m"} trailing', 400, None),
        (b'{"model":"\xff"}', 400, "model"),
        (b"[" * 100_000, 400, None),
        (b'{"a":' + b"[" * 100_000, 400, None),
        (b'{"model":7}', 400, "model"),
        (b'{"model":"other"}', 404, "model"),
    ],
)
async def test_a_body_that_no_engine_should_see(body: bytes, status: int, param: str | None) -> None:
    """An error in the usual shape, with the request's id, and no engine is bothered."""
    async with rig() as r:
        reply = await r.ask(body, x_request_id="me")
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (status, status, param)
        assert reply.headers["x-request-id"] == "me"
        assert r.p.seen == []
        await r.settled()


async def test_the_missing_model_is_named_as_an_engine_names_it() -> None:
    """Clients match on this text and type."""
    async with rig() as r:
        error = (await r.ask({"model": "gpt-9"})).json()["error"]
        assert error == {
            "message": "The model `gpt-9` does not exist. Valid aliases: alias, m.",
            "type": "NotFoundError", "param": "model", "code": 404,
        }  # fmt: skip


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"model": None}, {"model": ""}, {"model": "alias"}])
async def test_a_request_without_a_name_or_with_another_served_one_is_served(body: dict[str, Any]) -> None:
    """As an engine does it."""
    async with rig() as r:
        assert (await r.ask(body)).status == 200


async def test_a_body_that_is_not_declared_as_json_is_refused() -> None:
    """As an engine does it."""
    async with rig() as r:
        assert (await r.ask(None, content_type="text/plain")).status == 400
        assert (await r.ask(None, content_type="Application/JSON; charset=utf-8")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nope", 404, "NotFoundError"),
        ("GET", "/v1/chat/completions", 405, "MethodNotAllowedError"),
        ("POST", "/v1/models", 405, "MethodNotAllowedError"),
        ("GET", "/v1/embeddings", 405, "MethodNotAllowedError"),
        ("GET", "/v1/responses/resp_1", 501, "NotImplementedError"),
        ("POST", "/v1/files", 501, "NotImplementedError"),
    ],
)
async def test_paths_that_are_not_served(method: str, path: str, status: int, kind: str) -> None:
    """Unknown, known with another method, and known but not over separate stages."""
    async with rig() as r:
        call = await Call.open(r.router.port)
        call.send(f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode())
        reply = await call.reply()
        assert (reply.status, reply.json()["error"]["type"]) == (status, kind)
        assert ("allow" in reply.headers) == (status == 405)
        await call.close()


async def test_a_body_over_the_limit_is_413() -> None:
    """The limit of the topology, in the usual shape."""
    async with rig(max_body_bytes=2000) as r:
        assert (await r.ask({"model": MODEL, "prompt": "x" * 1500})).status == 200
        reply = await r.ask({"model": MODEL, "prompt": "x" * 3000})
        assert (reply.status, reply.json()["error"]["type"]) == (413, "PayloadTooLargeError")


async def test_one_request_too_many_is_429_at_once() -> None:
    """With Retry-After; those under way are not touched, and the place is free again afterwards."""
    gate = asyncio.Event()
    async with rig(max_in_flight=2, max_queue=0) as r:
        r.d.script.extend([mock.gated(gate, mock.EVENTS[:1], mock.EVENTS[1:])] * 2)
        calls = [await r.call({"model": MODEL, "prompt": "x", "stream": True}) for _ in range(2)]
        for call in calls:
            await call.head()
        reply = await r.ask()
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert (await r.get("/health")).status == 200
        gate.set()
        for call in calls:
            while await call.chunk():
                pass
            await call.close()
        await r.settled()
        assert (await r.ask()).status == 200


async def test_smuggled_requests_reach_no_engine() -> None:
    """A body with two lengths is refused, and what it hides is not served."""
    hidden = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    async with rig() as r:
        call = await Call.open(r.router.port)
        call.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden
        )
        assert (await call.reply()).status == 400
        assert await call.reader.read() == b""
        assert r.p.seen == []
        await call.close()


async def test_pipelined_requests_keep_their_order() -> None:
    """Answers come in the order of the questions, on one connection, through both legs."""
    async with rig() as r:
        call = await Call.open(r.router.port)
        for n in range(5):
            body = b'{"prompt":"%d"}' % n
            call.send(
                b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nX-Request-Id: %d\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (n, len(body), body)
            )
        assert [(await call.reply()).headers["x-request-id"] for _ in range(5)] == ["0", "1", "2", "3", "4"]
        assert [b["prompt"] for b in r.d.bodies] == ["0", "1", "2", "3", "4"]
        await call.close()


# What is shown.


async def test_health_needs_a_ready_member_of_every_stage() -> None:
    """503 names the stage that is missing, and each instance with its state."""
    async with rig(prefill=2) as r:
        assert (await r.get("/health")).status == 200
        r.fleet.mark("prefill-0", "inc-prefill-0", State.DOWN)
        assert (await r.get("/health")).status == 200
        r.fleet.mark("prefill-1", "inc-prefill-1", State.DRAINING)
        reply = await r.get("/health")
        assert (reply.status, reply.json()["missing"]) == (503, ["prefill"])
        states = {m["name"]: m["state"] for m in reply.json()["instances"]}
        assert states == {"prefill-0": "down", "prefill-1": "draining", "decode-0": "ready"}


async def test_without_a_decode_instance_requests_are_refused_before_prefill_is_asked() -> None:
    """503 with Retry-After, and no KV is made that nobody can fetch."""
    async with rig() as r:
        r.fleet.mark("decode-0", "inc-decode-0", State.STARTING)
        reply = await r.ask()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert r.p.seen == []


async def test_models_are_the_served_names_with_the_smaller_limit() -> None:
    """Asked of an engine once per incarnation, and still there when no engine answers."""
    async with rig() as r:
        r.d.max_model_len = 1024
        reply = (await r.get("/v1/models")).json()
        assert [m["id"] for m in reply["data"]] == [MODEL, "alias"]
        assert {m["max_model_len"] for m in reply["data"]} == {1024}
        await r.p.stop()
        await r.d.stop()
        assert (await r.get("/v1/models")).json() == reply


async def test_models_are_listed_although_no_engine_tells_about_them() -> None:
    """An engine that cannot be asked costs the details, not the names."""
    async with rig(prefill=0) as r:
        await r.d.stop()
        reply = (await r.get("/v1/models")).json()
        assert [(m["id"], m["max_model_len"]) for m in reply["data"]] == [(MODEL, None), ("alias", None)]


async def test_version_and_metrics_are_pages() -> None:
    """Plain GETs of a process that works."""
    async with rig() as r:
        assert "version" in (await r.get("/version")).json()
        assert (await r.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_metrics_count_requests_legs_and_times() -> None:
    """By API, path, stage and instance; in-flight gauges are back at 0."""
    async with rig() as r:
        await r.ask({"model": MODEL, "prompt": "x", "stream": True})
        await r.ask({"model": MODEL, "messages": []}, path="/v1/chat/completions")
        labels = {"api": "/v1/chat/completions", "path": "disaggregated", "outcome": "ok"}
        assert await r.metric("disagg_requests_total", **labels) == 1
        for stage in ("prefill", "decode"):
            assert await r.metric("disagg_legs_total", stage=stage, engine=f"{stage}-0", outcome="ok") == 2
            assert await r.metric("disagg_leg_duration_seconds_count", stage=stage) == 2
            assert await r.metric("disagg_engine_state", stage=stage, state="ready") == 1
        assert await r.metric("disagg_time_to_first_token_seconds_count", path="disaggregated") == 1
        assert await r.metric("disagg_legs_in_flight") == 0
        assert await r.metric("disagg_requests_in_flight") == 0


async def test_the_access_log_tells_the_story_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """One line per request: id, path, instances, status, times; no credentials, no content."""
    with caplog.at_level(logging.INFO, "disagg.access"):
        async with rig() as r:
            await r.ask({"model": MODEL, "prompt": "sensitive"}, authorization="Bearer key", x_request_id="me")
            await r.ask({"model": "other"})
    first, second = [m.getMessage() for m in caplog.records if m.name == "disagg.access"]
    assert "id=me api=/v1/completions path=disaggregated prefill=prefill-0 decode=decode-0 status=200" in first
    assert "sensitive" not in first
    assert "key" not in first
    assert "status=404 outcome=refused" in second


# Life.


async def test_drain_ends_streams_in_peace() -> None:
    """A stop waits for what is under way and takes nothing new."""
    gate = asyncio.Event()
    async with rig() as r:
        r.d.script.append(mock.gated(gate, mock.EVENTS[:1], mock.EVENTS[1:]))
        call = await r.call({"model": MODEL, "prompt": "x", "stream": True})
        await call.head()
        draining = asyncio.create_task(r.router.drain(5))
        await asyncio.sleep(0.02)
        assert not draining.done()
        gate.set()
        body = b""
        while data := await call.chunk():
            body += data
        assert body == b"".join(mock.EVENTS)
        assert await draining is True
        await call.close()


async def test_stop_ends_everything_at_once() -> None:
    """Engines see the disconnect; nothing is left open."""
    async with rig() as r:
        r.d.script.append(mock.hangs)
        call = await r.call()
        await asyncio.wait_for(r.d.arrived.wait(), 5)
        await r.router.stop()
        await asyncio.wait_for(r.d.left.wait(), 5)
        assert r.router.in_flight == 0
        assert r.router.client.open_connections == 0
        await call.close()


async def test_the_fleet_changes_without_a_restart() -> None:
    """An instance that starts again on another port, one that is added, one that is removed."""
    async with rig(decode=1) as r:
        await r.ask()
        again = mock.MockEngine(mock.decoded)
        await again.start()
        r.fleet.update("decode-0", "second", again.url)
        assert (await r.ask()).status == 503
        r.fleet.mark("decode-0", "second", State.READY)
        assert (await r.ask()).status == 200
        assert len(again.seen) == 1
        assert (await r.ask(None, traceparent="x")).status == 200
        r.fleet.remove("decode-0")
        assert (await r.get("/health")).json()["missing"] == ["decode"]
        await again.stop()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/embeddings", 400),
    ],
)
async def test_every_answer_has_a_request_id(method: str, path: str, status: int) -> None:
    """Also pages, refusals, and what does not exist: the client's own id, or a fresh one."""
    async with rig() as r:
        for sent in ("", "x-request-id: mine\r\n"):
            call = await Call.open(r.router.port)
            call.send(f"{method} {path} HTTP/1.1\r\nhost: t\r\n{sent}content-length: 2\r\n\r\nxx".encode())
            reply = await call.reply()
            await call.close()
            assert reply.status == status
            assert len(reply.headers["x-request-id"]) == (4 if sent else 32)


async def test_a_bug_of_ours_is_told_with_the_id_of_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """500, counted as a failure, with the traceback in the log and not in the answer."""

    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    async with rig() as r:
        monkeypatch.setattr(r.router._route.dialect, "prefill_body", broken)
        reply = await r.ask(x_request_id="mine")
        assert (reply.status, reply.headers["x-request-id"]) == (500, "mine")
        assert b"secret" not in reply.body
        assert await r.metric("disagg_requests_total", reason="internal", outcome="failed") == 1
        assert "secret detail" in caplog.text
        await r.settled()


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"nonsense\r\n\r\n", 400, "bad-request"),
        (b"GET / HTTP/1.1\r\nhost: t\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 431, "headers-too-large"),
        (b"POST / HTTP/1.1\r\nhost: t\r\ncontent-length: 999999999999\r\n\r\n", 413, "payload-too-large"),
    ],
)
async def test_what_cannot_be_read_is_refused_with_an_id_and_counted(data: bytes, status: int, reason: str) -> None:
    """Scans and attempts at smuggling are seen in the metrics."""
    async with rig() as r:
        call = await Call.open(r.router.port)
        call.send(data)
        reply = await call.reply()
        await call.close()
        assert (reply.status, len(reply.headers["x-request-id"])) == (status, 32)
        assert await r.metric("disagg_requests_total", api="unread", reason=reason, outcome="refused") == 1
