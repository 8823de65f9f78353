"""Every API's own fields on both legs, requests that one instance answers alone, and those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.router.apis import ENDPOINTS, Way
from tests.support.mock_engine import answers, breaks, error, streamed
from tests.support.rig import Call, rig

REFUSED = [e.path.replace("*", "x") for e in ENDPOINTS if e.way is Way.REFUSED]
PASSED = [e.path for e in ENDPOINTS if e.way is Way.PASSED]


async def test_each_known_path_is_refused_with_a_reason() -> None:
    """501 and a sentence, whatever the method: a client learns that the API exists and why it is not here."""
    async with rig() as r:
        for path in REFUSED:
            for reply in (await r.get(path), await r.ask({}, path)):
                assert reply.status == 501, path
                told = reply.json()["error"]["message"]
                assert len(told) > len(path) + 20, told
        assert not r.p.seen
        assert not r.d.seen


async def test_what_is_passed_reaches_one_decode_instance_as_it_was_sent() -> None:
    """Same path, same bytes, and the answer as the engine wrote it; prefill is not asked."""
    sent = b'{ "model" : "m", "input":[1,2 , 3]}'
    async with rig() as r:
        for path in PASSED:
            r.d.script.append(answers(200, b'{"data" : 1.50}', b"application/json; charset=x"))
            reply = await r.ask(sent, path + "?a=b")
            assert (reply.status, reply.body) == (200, b'{"data" : 1.50}')
            assert reply.headers["content-type"] == "application/json; charset=x"
            assert reply.headers["x-disagg-path"] == "passed"
            assert (r.d.seen[-1].target, r.d.seen[-1].body) == (path + "?a=b", sent)
        assert not r.p.seen
        await r.settled()


async def test_what_is_passed_loses_keys_that_only_a_router_may_set() -> None:
    """They would work on any path that ends in the engine's scheduler."""
    body = {"model": "m", "kv_transfer_params": {"x": 1}, "vllm_xargs": {"kv_transfer_params": {}, "a": 1}}
    async with rig() as r:
        await r.ask(body, "/v1/chat/completions/batch")
        assert r.d.bodies == [{"model": "m", "vllm_xargs": {"a": 1}}]


async def test_a_form_is_passed_whole_unless_it_hides_such_keys() -> None:
    """A recording is not taken apart; what could steer an engine is refused wherever it stands."""
    head = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n\x00\xff\r\n--b--\r\n'
    kind = {"content_type": "multipart/form-data; boundary=b"}
    async with rig() as r:
        path = "/v1/audio/transcriptions"
        r.d.script.append(answers(200, b'{"text":"hi"}'))
        assert (await r.ask(head % b"file", path, **kind)).status == 200
        assert r.d.seen[0].body == head % b"file"
        assert r.d.seen[0].header(b"content-type") == b"multipart/form-data; boundary=b"
        for key in (b"vllm_xargs", b"kv_transfer_params"):
            assert (await r.ask(head % key, path, **kind)).status == 400
        assert len(r.d.seen) == 1


async def test_an_engines_refusal_is_passed_as_it_is() -> None:
    """The model cannot do it: that is the engine's to say."""
    async with rig() as r:
        r.d.script.append(error(404, "The model does not support Embeddings API"))
        reply = await r.ask({"model": "m", "input": "x"}, "/v1/embeddings")
        assert (reply.status, "Embeddings" in reply.json()["error"]["message"]) == (404, True)


async def test_a_path_that_no_engine_has_is_no_bare_404() -> None:
    """The engines serve another kind of model: 501 with the reason, and none of them is taken for broken."""
    async with rig() as r:
        for _ in range(10):
            r.d.script.append(answers(404, b'{"detail":"Not Found"}'))
            reply = await r.ask({"model": "m", "input": "x"}, "/v1/embeddings")
            assert reply.status == 501
            message = reply.json()["error"]["message"]
            assert "/v1/embeddings" in message
            assert "--colocated" in message
        assert (await r.ask({"prompt": "x"}, "/tokenize")).status == 200
        await r.settled()


async def test_an_unknown_model_is_refused_before_an_engine_is_asked() -> None:
    """The same as for what is split."""
    async with rig() as r:
        assert (await r.ask({"model": "other", "input": "x"}, "/v1/embeddings")).status == 404
        assert not r.d.seen


async def test_a_passed_answer_is_streamed_as_it_comes() -> None:
    """Transcriptions stream as well."""
    events = (b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n")
    async with rig() as r:
        r.d.script.append(streamed(events, pause_s=0.01))
        reply = await r.ask({"model": "m", "stream": True}, "/v1/audio/translations")
        assert reply.body == b"".join(events)
        await r.settled()


async def test_a_passed_answer_that_breaks_off_is_not_completed() -> None:
    """Nothing in a plain body could say so: the client's connection ends early as well."""
    async with rig() as r:
        r.d.script.append(streamed((b"data: 1\n\n",), end="abort"))
        reply = await r.ask({"model": "m"}, "/v1/audio/translations")
        assert not reply.complete
        r.d.script.append(breaks)
        assert (await r.ask({"model": "m"}, "/tokenize")).status == 502
        await r.settled()
        assert await r.metric("disagg_requests_total", api="/tokenize", outcome="failed") == 1


async def test_what_is_passed_goes_to_another_instance_if_one_is_gone() -> None:
    """A refused connection took nothing, so trying again is safe."""
    async with rig(decode=2) as r:
        await r.decode[0].stop()
        for _ in range(4):
            r.decode[1].script.append(answers(200, b"{}"))
            assert (await r.ask({"model": "m", "prompt": "x"}, "/tokenize")).status == 200
        await r.settled()


@pytest.mark.parametrize("key", ["previous_response_id", "conversation", "background"])
async def test_responses_that_need_stored_state_are_refused(key: str) -> None:
    """It lives in one engine process; the next request may meet another one."""
    async with rig() as r:
        body = {"model": "m", "input": "x", key: True if key == "background" else "resp_1"}
        reply = await r.ask(body, "/v1/responses")
        assert reply.status == 501
        assert reply.json()["error"]["param"] == key
        assert not r.p.seen


EVENT_ENDS: dict[str, bytes] = {
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n',
    "/inference/v1/generate": b"data: [DONE]\n\n",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": []},
    "/v1/responses": {"model": "m", "input": "x"},
    "/inference/v1/generate": {"model": "m", "token_ids": [1], "sampling_params": {}},
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_each_api_is_split_and_its_stream_ends_as_it_should(path: str) -> None:
    """Both legs on the API's own path; the stream passes byte by byte and is complete after its own last event."""
    first = b'event: first\ndata: {"n":1}\n\n' if path != "/inference/v1/generate" else b'data: {"n":1}\n\n'
    async with rig() as r:
        r.d.script.append(streamed((first, EVENT_ENDS[path])))
        reply = await r.ask({**BODIES[path], "stream": True}, path)
        assert reply.body == first + EVENT_ENDS[path]
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert [e.seen[0].path for e in (r.p, r.d)] == [path, path]
        await r.settled()
        assert await r.metric("disagg_requests_total", api=path, outcome="ok") == 1


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_broken_stream_of_each_api_ends_with_its_own_error(path: str) -> None:
    """Exactly one, and nothing after it."""
    first = b'event: first\ndata: {"n":1}\n\n' if path != "/inference/v1/generate" else b'data: {"n":1}\n\n'
    async with rig() as r:
        r.d.script.append(streamed((first,), end="abort"))
        reply = await r.ask({**BODIES[path], "stream": True}, path)
        assert reply.complete
        assert reply.body.startswith(first)
        end = reply.body.removeprefix(first)
        assert end.count(b"error") >= 1
        if path == "/inference/v1/generate":
            assert end.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(end.partition(b"data: ")[2])["type"] == "error"
            assert b"[DONE]" not in end


async def test_refusals_of_the_messages_api_have_its_shape() -> None:
    """Its client libraries read no other."""
    async with rig() as r:
        for reply in (
            await r.ask({"model": "other", "messages": []}, "/v1/messages"),
            await r.ask(b"[", "/v1/messages"),
            await r.ask({}, "/v1/messages/batches"),
        ):
            assert reply.json()["type"] == "error"
            assert set(reply.json()["error"]) == {"type", "message"}
        call = await Call.open(r.router.port)
        call.send(b"GET /v1/messages HTTP/1.1\r\nHost: h\r\n\r\n")
        reply = await call.reply()
        assert (reply.status, reply.json()["type"]) == (405, "error")
        await call.close()
