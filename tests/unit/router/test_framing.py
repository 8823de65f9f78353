"""How the streams of each API end."""

from __future__ import annotations

import json

import pytest

from disagg.engines.base import Api
from disagg.errors import NoInstanceError, UpstreamTimeoutError
from disagg.router.framing import FRAMINGS, error_reply
from disagg.router.relay import error_status
from tests.support.streams import event_relay

ENDS = {
    Api.CHAT: b"data: [DONE]\n\n",
    Api.COMPLETIONS: b"data: [DONE]\n\n",
    Api.GENERATE: b"data: [DONE]\n\n",
    Api.MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    Api.RESPONSES: b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n',
}


@pytest.mark.parametrize("api", list(Api))
def test_a_stream_is_complete_after_its_apis_last_event(api: Api) -> None:
    """And not before: one that stops short of it has broken."""
    relay = event_relay(lambda _: None, FRAMINGS[api])
    relay(b'event: x\ndata: {"text":"[DONE] event: message_stop\\nevent: response.completed\\n"}\n\n')
    assert not relay.ended
    relay(ENDS[api])
    assert relay.ended
    assert not relay.saw_error


@pytest.mark.parametrize("api", list(Api))
def test_what_ends_a_broken_stream_is_one_error_in_the_apis_own_shape(api: Api) -> None:
    """A client library of that API takes it for an error, and knows that nothing follows."""
    end = FRAMINGS[api].broken(UpstreamTimeoutError("late"))
    assert end.endswith(b"\n\n")
    events = end.split(b"\n\n")[:-1]
    data = json.loads(events[0].partition(b"data: ")[2])
    if api in {Api.MESSAGES, Api.RESPONSES}:
        assert len(events) == 1
        assert events[0].startswith(b"event: error\n")
        assert data["type"] == "error"
    else:
        assert events[1] == b"data: [DONE]"
        assert data["error"]["code"] == 504
    assert b"late" in end


def test_an_engines_first_event_can_be_an_error_of_any_shape() -> None:
    """Nothing has been sent then, so another engine may be tried."""
    event = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"m"}}\n\n'
    assert error_status(event) == 500
    relay = event_relay(lambda _: None, FRAMINGS[Api.MESSAGES])
    relay(event)
    assert relay.rejected
    assert not relay.started


def test_errors_of_the_messages_api_have_its_shape() -> None:
    """The status is the same as elsewhere, and so is `Retry-After`."""
    answer = error_reply("/v1/messages", NoInstanceError("none"))
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {"type": "ServiceUnavailableError", "message": "none"},
    }
    assert answer.status == 503
    assert dict(answer.headers)[b"retry-after"]
    assert "code" in json.loads(error_reply("/v1/responses", NoInstanceError("none")).body)["error"]
