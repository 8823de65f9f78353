"""Requests and answers as values, and the one place where an error becomes an HTTP answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from disagg.errors import CapacityError, ClientError, DisaggError, UnauthorizedError

Header = tuple[bytes, bytes]
"""Name in lower case, value as sent (blanks at its end included)."""

JSON_TYPE: Header = (b"content-type", b"application/json")
SSE_TYPE: Header = (b"content-type", b"text/event-stream; charset=utf-8")


class Request(msgspec.Struct):
    """One complete request, its body included.

    Attributes:
        method: Upper-case method.
        target: Request target as sent, in origin form (``/path?query``).
        path: The target without its query; not percent-decoded.
        headers: Header lines in the order sent, names in lower case.
        body: The whole body, without transfer coding.
        http_1_0: Whether the client speaks HTTP/1.0 (it gets no chunked answers).
        keep_alive: Whether the client wants the connection to stay open.
        peer: Address of the client, for logs.
        received_at: `loop.time()` when the request was complete, in seconds.
    """

    method: str
    target: str
    path: str
    headers: list[Header]
    body: bytes = b""
    http_1_0: bool = False
    keep_alive: bool = True
    peer: str = ""
    received_at: float = 0.0

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (name in lower case), or None."""
        return find_header(self.headers, name)


class Answer(msgspec.Struct, frozen=True):
    """A complete answer.

    Attributes:
        status: HTTP status code.
        body: The whole body.
        headers: Further headers; length, date and connection are the server's.
    """

    status: int
    body: bytes
    headers: tuple[Header, ...] = (JSON_TYPE,)


def find_header(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of a header (name in lower case) without blanks around it, or None."""
    for key, value in headers:
        if key == name:
            return value.strip()
    return None


def error_object(error: DisaggError) -> dict[str, dict[str, str | int | None]]:
    """The body of an error in the shape that OpenAI clients and vLLM share."""
    param = error.param if isinstance(error, ClientError) else None
    return {"error": {"message": str(error), "type": error.kind, "param": param, "code": error.status}}


def error_answer(error: DisaggError) -> Answer:
    """Turn an error into its HTTP answer: status and JSON body, and `Retry-After` where waiting helps."""
    headers: tuple[Header, ...] = (JSON_TYPE,)
    if isinstance(error, CapacityError):
        headers = (JSON_TYPE, (b"retry-after", b"%d" % error.retry_after_s))
    elif isinstance(error, UnauthorizedError):
        headers = (JSON_TYPE, (b"www-authenticate", b"Bearer"))
    return Answer(error.status, msgspec.json.encode(error_object(error)), headers)


def json_answer(status: int, value: object) -> Answer:
    """An answer whose body is `value` as JSON."""
    return Answer(status, msgspec.json.encode(value))
