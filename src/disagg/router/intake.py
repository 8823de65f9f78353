"""What a client may send, checked once at the door, before any engine hears of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.errors import BadRequestError, NotDisaggregableError, UnknownModelError
from disagg.http.messages import Header, Request

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string_or_null = msgspec.json.Decoder(str | None)
_PRIORITY = re.compile(rb"-?[0-9]{1,9}")
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
        session: What it has in common with others of its session; empty if that is not known, or nobody asks.
    """

    api: Api
    body: Body
    stream: bool
    headers: tuple[Header, ...]
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What engines are told about who asks.

    Attributes:
        passed_on: Client headers that reach them.
        added: Headers that the router adds to each leg.
    """

    passed_on: frozenset[bytes] = PASSED_ON
    added: tuple[Header, ...] = ()

    @classmethod
    def behind_keys(cls, engine: tuple[Header, ...]) -> Self:
        """Where the router asks clients for keys: those stay here, and the engines get the router's own."""
        return cls(PASSED_ON - {b"authorization"}, engine)

    def headers(self, request: Request) -> tuple[Header, ...]:
        """The headers of a leg that come from the client or stand for it."""
        passed_on = self.passed_on
        return (*[h for h in request.headers if h[0] in passed_on], *self.added)


def read_intake(
    api: Api, request: Request, names: Collection[str], internal: frozenset[str], credentials: Credentials
) -> Intake:
    """Check a request.

    Args:
        api: The API that was called.
        request: As it came.
        names: Models that are served here.
        internal: Body keys that are removed.
        credentials: Which headers reach the engines.

    Raises:
        BadRequestError: If the body is not a JSON object, or is not declared as JSON.
        UnknownModelError: If it names a model that is not served here.
        NotDisaggregableError: If it asks for state that would have to outlive it.
    """
    body = read_body(request)
    check_model(body, names)
    if bodies.holds_internal(body, internal):
        body = bodies.client_body(body, internal)
    if api is Api.RESPONSES:
        _check_stateless(body)
    return Intake(api, body, "stream" in body and bodies.is_true(body, "stream"), credentials.headers(request))


def _check_stateless(body: Body) -> None:
    """Stored responses live in the memory of one engine process, and the next request may meet another one."""
    for key in ("previous_response_id", "conversation"):
        if not bodies.is_null(body, key):
            raise NotDisaggregableError(
                f"{key} names state inside one engine process, and there are several behind this endpoint.",
                hint="Send the earlier turns as `input`.",
                param=key,
            )
    if "background" in body and bodies.is_true(body, "background"):
        raise NotDisaggregableError(
            "A response in the background is kept by one engine process, and there are several behind this endpoint.",
            hint="Leave `background` out, and stream the answer if it takes long.",
            param="background",
        )


def read_body(request: Request) -> Body:
    """The keys of a JSON body.

    Raises:
        BadRequestError: If the body is not a JSON object, or is not declared as JSON.
    """
    declared = request.header(b"content-type") or b""
    if declared != b"application/json" and declared.partition(b";")[0].strip().lower() != b"application/json":
        # As vLLM does; it also keeps web pages from sending requests without the browser asking first.
        raise BadRequestError("Unsupported media type: the body has to be sent as application/json.")
    try:
        return _object.decode(request.body)
    except msgspec.ValidationError as error:
        raise BadRequestError("The body has to be a JSON object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"The body is not valid JSON: {error}.") from error


def check_length(intake: Intake, limit: int | None) -> None:
    """Refuse a prompt of token ids that is too long for one of the stages, before any of them is asked.

    The length of a text is not known here; prefill refuses it, and decode is never asked.

    Args:
        intake: The request.
        limit: The smallest context limit of the stages, in tokens; None if it is not known.

    Raises:
        BadRequestError: If it is too long.
    """
    body = intake.body
    raw = body.get("prompt") or body.get("token_ids")
    # Each id takes two bytes at least, so most prompts need no counting.
    if limit is None or raw is None or memoryview(raw).nbytes < 2 * limit:
        return
    count = bodies.prompt_ids(intake.api, body)
    if count is None or count <= limit or not bodies.is_null(body, "truncate_prompt_tokens"):
        return
    at_least = "at least " if count == limit + 1 else ""
    raise BadRequestError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {at_least}{count}"
        " input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the"
        f" input prompt. (parameter=input_tokens, value={count})",
        param="input_tokens",
    )


def check_model(body: Body, names: Collection[str]) -> None:
    """Check the name of the model, if there is one.

    Raises:
        BadRequestError: If it is no name.
        UnknownModelError: If it is not served here.
    """
    raw = body.get("model")
    if raw is None:
        return
    try:
        name = _string_or_null.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError("The model has to be a name.", param="model") from error
    # Without a name an engine takes its own model, and so do we.
    if name and name not in names:
        valid = ", ".join(sorted(names))
        raise UnknownModelError(f"The model `{name}` does not exist. Valid aliases: {valid}.", param="model")


def priority_of(request: Request, body: Body) -> int:
    """How urgent a request is, lower is more: its body's `priority`, else the header `x-priority`, else 0.

    A value that is no whole number is the engine's to refuse, or nothing at all in the header.
    """
    raw = body.get("priority")
    text = bytes(raw) if raw is not None else request.header(b"x-priority")
    return int(text) if text is not None and _PRIORITY.fullmatch(text) else 0


def model_of(body: Body) -> str:
    """The model that a checked request names; empty if it leaves the choice to us."""
    raw = body.get("model")
    return (_string_or_null.decode(raw) or "") if raw is not None else ""


def public_id(request: Request) -> bytes | None:
    """The client's own request id if it can stand in headers and logs as it is, else None."""
    value = request.header(b"x-request-id")
    return value if value is not None and _SANE_ID.fullmatch(value) else None
