"""A plain HTTP client for tests: sees the status, headers and bytes as they came, and nothing else."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole HTTP answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of an SSE body as JSON, `[DONE]` as that text; framing errors fail the test."""
        assert self.body.endswith(b"\n\n"), f"the stream does not end with a blank line: {self.body[-80:]!r}"
        events: list[Any] = []
        for block in self.body.split(b"\n\n")[:-1]:
            assert block.startswith(b"data: "), f"not an SSE data block: {block!r}"
            data = block.removeprefix(b"data: ")
            assert b"\n" not in data, f"more than one line in an event: {block!r}"
            events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        return events


def request(
    url: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    timeout_s: float = 120.0,
) -> Answer:
    """Send one request on a connection of its own. `body` is JSON, or bytes to send as they are."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request(
            method or ("GET" if data is None else "POST"),
            path,
            body=data,
            headers={"content-type": "application/json", **(headers or {})},
        )
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def metric(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples in Prometheus text whose labels include the given ones; 0 if there is none."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith("#") or not line.startswith(name):
            continue
        key, _, value = line.rpartition(" ")
        base, _, rest = key.partition("{")
        if base == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
            total += float(value)
    return total
