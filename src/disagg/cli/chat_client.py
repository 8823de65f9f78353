"""A small blocking client of the OpenAI chat API, for the terminal: one streamed answer at a time."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from disagg.errors import BadRequestError, UpstreamProtocolError, UpstreamUnreachableError

Message = dict[str, str]
_MAX_ERROR_BYTES = 64 * 1024


@dataclass(slots=True)
class AnswerStats:
    """What is known about an answer once it has ended.

    Attributes:
        ttft_s: Seconds from sending the request to the first text; None if there was none.
        total_s: Seconds from sending the request to the end.
        prompt_tokens: From the usage of the answer; None if the server sent none.
        completion_tokens: From the usage of the answer; None if the server sent none.
        finish_reason: As the server gave it.
        route: The `x-disagg-*` response headers.
    """

    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    route: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for people: tokens, time to first token, speed, path."""
        parts: list[str] = []
        if self.completion_tokens is not None:
            parts.append(f"{self.prompt_tokens} prompt + {self.completion_tokens} answer tokens")
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
            decode_s = self.total_s - self.ttft_s
            if self.completion_tokens is not None and self.completion_tokens > 1 and decode_s > 0:
                parts.append(f"then {(self.completion_tokens - 1) / decode_s:.1f} tokens/s")
        path = self.route.get("x-disagg-path")
        if path:
            legs = [self.route[h] for h in ("x-disagg-prefill", "x-disagg-decode") if h in self.route]
            parts.append(f"{path} ({' -> '.join(legs)})" if legs else path)
        return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to talk to.

    Attributes:
        url: Base URL, with or without a trailing `/v1`.
        api_key: Sent as a bearer token; None sends none.
        timeout_s: The longest silence of the server.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0

    def connect(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection, not opened yet, and the path prefix.

        Raises:
            BadRequestError: If the URL is not an http(s) URL.
        """
        try:
            parts = urlsplit(self.url)
            if parts.scheme in {"http", "https"} and parts.hostname:
                # What sockets and the Host header make of the name: no label empty or over 63 characters.
                parts.hostname.encode("idna")
                kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
                prefix = parts.path.rstrip("/").removesuffix("/v1")
                return kind(parts.hostname, parts.port, timeout=self.timeout_s), prefix
        except (ValueError, http.client.InvalidURL):
            pass
        raise BadRequestError(f"--url {self.url!r} is not an http:// or https:// address.")

    def headers(self) -> dict[str, str]:
        """Request headers.

        Raises:
            BadRequestError: If the key cannot stand in one; the key is not shown.
        """
        base = {"content-type": "application/json"}
        if self.api_key is None:
            return base
        key = self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise BadRequestError(
                "DISAGG_API_KEY or OPENAI_API_KEY holds a line end or a character that no header can carry."
            )
        return {**base, "authorization": f"Bearer {key}"}


def list_models(endpoint: Endpoint) -> list[str]:
    """Names of the models that the endpoint serves.

    Raises:
        UpstreamUnreachableError: If nothing answers there.
        UpstreamProtocolError: If the answer is not a model list.
    """
    with _response(endpoint, "GET", "/v1/models", None) as answer:
        data = _read(answer, endpoint)
        try:
            names = [str(m["id"]) for m in json.loads(data)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UpstreamProtocolError(f"{endpoint.url}/v1/models did not answer with a model list.") from error
    if not names:
        raise UpstreamProtocolError(f"{endpoint.url} serves no model.")
    return names


def stream_chat(
    endpoint: Endpoint,
    model: str,
    messages: Sequence[Message],
    options: Mapping[str, float | int],
    stats: AnswerStats,
) -> Generator[str, None, None]:
    """Send a conversation and yield the answer's text as it arrives.

    Args:
        endpoint: Where to send it.
        model: Served model name.
        messages: The conversation so far.
        options: Further body fields, such as `max_tokens` and `temperature`.
        stats: Filled in while the answer arrives.

    Raises:
        UpstreamUnreachableError: If nothing answers, or the connection breaks in mid-answer.
        UpstreamProtocolError: If the server answers with an error; its message is kept.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    started = time.monotonic()
    with _response(endpoint, "POST", "/v1/chat/completions", json.dumps(body).encode()) as answer:
        stats.route = {k.lower(): v for k, v in answer.getheaders() if k.lower().startswith("x-disagg-")}
        for event in _events(answer, endpoint):
            if "error" in event:
                raise UpstreamProtocolError(f"The answer broke off: {_error_text(event)}")
            usage = event.get("usage")
            if isinstance(usage, dict):
                stats.prompt_tokens = _count(usage.get("prompt_tokens"))
                stats.completion_tokens = _count(usage.get("completion_tokens"))
            for choice in _objects(event.get("choices")):
                reason = choice.get("finish_reason")
                stats.finish_reason = reason if isinstance(reason, str) else stats.finish_reason
                delta = choice.get("delta")
                text = (delta.get("content") or delta.get("reasoning_content")) if isinstance(delta, dict) else None
                if isinstance(text, str) and text:
                    if stats.ttft_s is None:
                        stats.ttft_s = time.monotonic() - started
                    yield text
        stats.total_s = time.monotonic() - started


class _response:  # noqa: N801 - used as a context manager function
    """Send a request; the answer inside the block, the connection closed after it."""

    def __init__(self, endpoint: Endpoint, method: str, path: str, body: bytes | None) -> None:
        self._endpoint = endpoint
        self._method = method
        self._path = path
        self._body = body
        self._connection, self._prefix = endpoint.connect()

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            self._connection.request(
                self._method, self._prefix + self._path, body=self._body, headers=self._endpoint.headers()
            )
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise UpstreamUnreachableError(
                f"No answer from {self._endpoint.url}: {error}.",
                hint="Is `disagg serve` running there? Set another address with --url.",
            ) from error
        if answer.status != http.HTTPStatus.OK:
            try:
                data = _read(answer, self._endpoint, _MAX_ERROR_BYTES)
            finally:
                self._connection.close()
            raise UpstreamProtocolError(f"{self._endpoint.url} answered {answer.status}: {_body_text(data)}")
        return answer

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _read(answer: http.client.HTTPResponse, endpoint: Endpoint, limit: int | None = None) -> bytes:
    try:
        return answer.read(limit)
    except (OSError, http.client.HTTPException) as error:
        raise UpstreamUnreachableError(f"The connection to {endpoint.url} broke in mid-answer: {error}.") from error


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _events(answer: http.client.HTTPResponse, endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    """The JSON objects of an SSE stream, up to `[DONE]`."""
    try:
        for line in answer:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data and line.startswith(b"data:"):
                event = json.loads(data)
                if isinstance(event, dict):
                    yield event
    except (OSError, http.client.HTTPException) as error:
        raise UpstreamUnreachableError(f"The connection to {endpoint.url} broke in mid-answer: {error}.") from error
    except ValueError as error:
        raise UpstreamProtocolError(f"{endpoint.url} sent an event that is not JSON.") from error
    raise UpstreamProtocolError(f"The stream from {endpoint.url} ended without [DONE]; the answer is incomplete.")


def _body_text(data: bytes) -> str:
    try:
        return _error_text(json.loads(data))
    except ValueError:
        return data.decode(errors="replace")[:500]


def _error_text(event: object) -> str:
    error = event.get("error") if isinstance(event, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error or event)
