"""From an engine's answer to the client's: which headers, which bytes, and how a stream ends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from disagg.http.messages import Header
from disagg.http.response import Response
from disagg.router.framing import OPENAI, Framing
from disagg.router.passage import Passage
from disagg.router.sink import Sink

_MAX_EVENT = 8 * 1024**2
_ERROR_EVENT = b'data: {"error"'
_NAMED_ERROR = b"event: error\n"
_HIDDEN_KEYS = ("kv_transfer_params", "ec_transfer_params")
# The connection's own headers, and those that the router sets.
_NOT_RELAYED = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"content-length", b"date", b"server", b"x-request-id",
})  # fmt: skip
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")


class _EventError(msgspec.Struct):
    code: int = 500


class _ErrorEvent(msgspec.Struct):
    error: _EventError


_error_event = msgspec.json.Decoder(_ErrorEvent)


def relayed_headers(headers: list[Header]) -> list[Header]:
    """An engine's headers as the client gets them."""
    return [h for h in headers if h[0] not in _NOT_RELAYED and not h[0].startswith(b"x-disagg-")]


def is_event_stream(response: Response) -> bool:
    """Whether the answer is a stream of server-sent events."""
    return (response.header(b"content-type") or b"").startswith(b"text/event-stream")


def hide_internal(body: bytes) -> bytes:
    """Blank transfer parameters in an engine's answer: they would let a client read the KV of others.

    The keys stay with the value null, as in the answer of an engine that hands nothing over. All other values keep
    their bytes, and a body that shows nothing keeps all of them.
    """
    shown = body.count(b'_transfer_params"')
    # In a JSON string this text has a backslash before the quote, so each hit is a key.
    if shown == 0 or shown == body.count(b'_transfer_params":null') + body.count(b'_transfer_params": null'):
        return body
    try:
        fields = _object.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # no JSON object, so no parameters in it either
    for key in _HIDDEN_KEYS:
        if key in fields:
            fields[key] = _NULL
    return msgspec.json.encode(fields)


class EventRelay:
    """Passes a stream on in whole events, so that a stream which breaks inside one still ends cleanly.

    Bytes are not parsed: an engine sends whole events in nearly every read, and those pass as they came.

    Args:
        write: Takes the bytes; the first call begins the answer.
        passage: Remembers them, and lets later ones take the short way.
        framing: How streams of this API end.
        holds_errors: An engine's error event in mid-stream is kept in `held` instead of being passed on.

    Attributes:
        started: The client has been sent something.
        rejected: The stream's first event, if it is an error of the engine (5xx): nothing has been passed on then.
        refused: The stream's first event is an error of the request (4xx); it has been passed on.
        shortcut: Who gets bytes by the short way once the answer has begun; None if bytes may have to change.
        saw_error: The engine put an error event into the stream.
        held: That event and what followed, if it is held.
    """

    __slots__ = (
        "_error_mark",
        "_framing",
        "_holds_errors",
        "_passage",
        "_tail",
        "_write",
        "held",
        "refused",
        "rejected",
        "saw_error",
        "shortcut",
        "started",
    )

    def __init__(
        self,
        write: Callable[[bytes], None],
        passage: Passage,
        framing: Framing = OPENAI,
        *,
        holds_errors: bool = False,
    ) -> None:
        self._write = write
        self._passage = passage
        self._framing = framing
        self._error_mark = framing.error_mark
        self._tail = b""
        self.started = False
        self.rejected = b""
        self.refused = False
        self.saw_error = False
        self.shortcut: Sink | None = None
        self.held = b""
        self._holds_errors = holds_errors

    def __call__(self, data: bytes) -> None:
        """The next bytes of the stream."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith((b"\n\n", b"\r\n\r\n")):
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            # rfind's -1 gives 1 or 3 where there is no blank line at all.
            cut = cut if cut > 3 else 0
            if len(data) - cut <= _MAX_EVENT:
                self._tail = data[cut:]
                data = data[:cut]
        if data:
            self._pass(data)
        if self.shortcut is not None:
            if self._tail or not self.started or self.saw_error:
                self._passage.close()
            else:
                self._passage.open(self.shortcut)

    def _pass(self, data: bytes) -> None:
        if self._error_mark in data:
            self.saw_error = True
            at = data.find(self._error_mark)
            if not self.started and not self.rejected and not at:
                status = error_status(data)
                self.refused = 0 < status < 500
                if status >= 500:
                    self.rejected = data
            elif self._holds_errors and not self.held:
                data, self.held = data[:at], data[at:]
                if data:
                    self.started = True
                    self._write(data)
                return
        if self.rejected or self.held:
            return
        passage = self._passage
        passage.before = passage.last
        passage.last = data
        self.started = True
        self._write(data)

    @property
    def ended(self) -> bool:
        """Whether the client has been sent the terminator."""
        return self._framing.is_end(self._passage.last)

    def end(self) -> bytes:
        """The last two pieces that were passed on: an engine sends its usage right before the terminator."""
        return self._passage.before + self._passage.last

    def rest(self) -> bytes:
        """Bytes after the last whole event."""
        return self._tail


def error_status(data: bytes) -> int:
    """The status in a stream's first event; 0 if that is no error event."""
    if not data.startswith((_ERROR_EVENT, _NAMED_ERROR)):
        return 0
    try:
        return _error_event.decode(error_body(data)).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 500


def error_body(data: bytes) -> bytes:
    """The JSON in a stream's first event."""
    return data.removeprefix(_NAMED_ERROR).partition(b"\n")[0].removeprefix(b"data: ").rstrip()
