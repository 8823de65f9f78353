"""What a client may send, checked once at the door, before any engine hears of it."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.errors import BadRequestError, UnknownModelError
from disagg.http.messages import Header, Request

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string_or_null = msgspec.json.Decoder(str | None)
_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")

PASSED_ON = frozenset({b"authorization", b"traceparent", b"tracestate", b"baggage", b"user-agent"})
"""Request headers that reach the engines. All others are the connection's, the router's own, or could steer an
engine (its request id, its data-parallel rank)."""


class Intake(msgspec.Struct, frozen=True):
    """A request that may be served.

    Attributes:
        api: The API that was called.
        body: The client's body without keys that only a router may set.
        stream: The client asked for server-sent events.
        headers: The client's headers that reach the engines.
    """

    api: Api
    body: Body
    stream: bool
    headers: tuple[Header, ...]


def read_intake(api: Api, request: Request, names: Collection[str], internal: frozenset[str]) -> Intake:
    """Check a request.

    Args:
        api: The API that was called.
        request: As it came.
        names: Models that are served here.
        internal: Body keys that are removed.

    Raises:
        BadRequestError: If the body is not a JSON object, or is not declared as JSON.
        UnknownModelError: If it names a model that is not served here.
    """
    media_type = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        # As vLLM does; it also keeps web pages from sending requests without the browser asking first.
        raise BadRequestError("Unsupported media type: the body has to be sent as application/json.")
    try:
        body = _object.decode(request.body)
    except msgspec.ValidationError as error:
        raise BadRequestError("The body has to be a JSON object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"The body is not valid JSON: {error}.") from error
    _check_model(body, names)
    if not internal.isdisjoint(body) or "vllm_xargs" in body:
        body = bodies.client_body(body, internal)
    headers = tuple([h for h in request.headers if h[0] in PASSED_ON])
    return Intake(api, body, "stream" in body and bodies.is_true(body, "stream"), headers)


def _check_model(body: Body, names: Collection[str]) -> None:
    raw = body.get("model")
    if raw is None:
        return
    try:
        name = _string_or_null.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError("The model has to be a name.", param="model") from error
    # Without a name an engine takes its own model, and so do we.
    if name and name not in names:
        raise UnknownModelError(f"The model `{name}` does not exist.", param="model")


def public_id(request: Request) -> bytes | None:
    """The client's own request id if it can stand in headers and logs as it is, else None."""
    value = request.header(b"x-request-id")
    return value if value is not None and _SANE_ID.fullmatch(value) else None
