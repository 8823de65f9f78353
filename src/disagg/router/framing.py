"""How the streams of each API end, well or badly. Everything else in a stream is the engine's and passes as it is.

Chat, completions and tokens-in send bare ``data:`` lines and end with ``data: [DONE]``. Responses and messages name
each event, and end with an event of their own; a client of theirs that never sees it waits, or reports an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from disagg.engines.base import Api
from disagg.errors import DisaggError
from disagg.http.messages import Answer, error_answer, error_object

DONE = b"data: [DONE]\n\n"
_TAIL = 16


@dataclass(frozen=True, slots=True)
class Framing:
    """One way to frame a stream.

    Attributes:
        error_mark: What an engine's error event has in it. Line breaks inside JSON are escaped, so no text of an
            answer can contain it.
        ends: What the last event of a complete stream has in it.
        tail: How many of a stream's last bytes have to be looked at for that; 0 for the whole last piece.
        broken: Writes the end of a stream that broke.
    """

    error_mark: bytes
    ends: tuple[bytes, ...]
    tail: int
    broken: Callable[[DisaggError], bytes]

    def is_end(self, last: bytes) -> bool:
        """Whether a stream whose last piece this is was complete."""
        seen = last[-self.tail :] if self.tail else last
        return any(mark in seen for mark in self.ends)


def error_reply(path: str, error: DisaggError) -> Answer:
    """An error as the clients of a path expect it."""
    answer = error_answer(error)
    if not path.startswith(Api.MESSAGES):
        return answer
    return Answer(answer.status, msgspec.json.encode(anthropic_error(error)), answer.headers)


def anthropic_error(error: DisaggError) -> dict[str, object]:
    """An error in the shape of the messages API."""
    return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


def _openai_broken(error: DisaggError) -> bytes:
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n" + DONE


def _messages_broken(error: DisaggError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(anthropic_error(error)) + b"\n\n"


def _responses_broken(error: DisaggError) -> bytes:
    # The number of the event is not known here, because a stream is not parsed; clients order by arrival.
    event = {"type": "error", "code": str(error.status), "message": str(error), "param": None, "sequence_number": 0}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


OPENAI = Framing(b'data: {"error"', (b"[DONE]",), _TAIL, _openai_broken)
MESSAGES = Framing(b"event: error\n", (b"event: message_stop\n",), 0, _messages_broken)
RESPONSES = Framing(
    b"event: error\n",
    (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"),
    0,
    _responses_broken,
)
FRAMINGS: Mapping[Api, Framing] = {
    Api.CHAT: OPENAI,
    Api.COMPLETIONS: OPENAI,
    Api.GENERATE: OPENAI,
    Api.RESPONSES: RESPONSES,
    Api.MESSAGES: MESSAGES,
}
