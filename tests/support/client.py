"""A client that keeps account: it sees each byte of its answer, and how often the answer ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Ending(StrEnum):
    """How a request ended, as its client sees it. Every request ends in exactly one of these ways."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """A status of 4xx."""
    FAILED = "failed"
    """A status of 5xx."""
    BROKEN = "broken"
    """The stream had begun, and ended with one error event."""
    LEFT = "left"
    """The client went away on purpose."""
    CUT = "cut"
    """The answer just stopped. This is never right."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one client does.

    Attributes:
        body: The request.
        path: The API.
        headers: Further request headers.
        leave_after_s: Go away so many seconds after sending, if the answer is not complete by then.
        leave_after_bytes: Go away when so many bytes of the answer have been read.
        pause_s: Wait so long between reads of at most 512 bytes.
    """

    body: Mapping[str, Any]
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=dict)
    leave_after_s: float | None = None
    leave_after_bytes: int | None = None
    pause_s: float = 0.0

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        ask: What was asked.
        ending: How it ended.
        status: Of the answer; 0 if none came.
        headers: Of the answer, names in lower case.
        body: Without transfer coding.
        text: What the model said, one entry per choice.
        finish: Finish reasons, one per choice.
        usage: As answered.
        problems: What is wrong with the form of the answer; always empty in a correct system.
        began, ended: Loop time in seconds.
    """

    ask: Ask
    ending: Ending = Ending.CUT
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    @property
    def instances(self) -> set[str]:
        """The instances that the answer names."""
        return {self.headers[k] for k in ("x-disagg-prefill", "x-disagg-decode") if k in self.headers}

    def __str__(self) -> str:
        said = self.body[-300:].decode("utf-8", "replace")
        return f"{self.ending} {self.status} {self.headers} {self.problems} {said}"


async def ask(port: int, what: Ask, host: str = "127.0.0.1") -> Result:
    """Send one request on a connection of its own, read until the server closes it, and judge what came."""
    loop = asyncio.get_running_loop()
    result = Result(what, began=loop.time())
    reader, writer = await asyncio.open_connection(host, port)
    raw = b""
    try:
        writer.write(_request(what))
        if what.leave_after_s is None:
            raw = await _read(reader, what)
        else:
            try:
                async with asyncio.timeout(what.leave_after_s):
                    raw = await _read(reader, what)
            except TimeoutError:
                result.ending = Ending.LEFT
        if what.leave_after_bytes is not None and len(raw) >= what.leave_after_bytes:
            result.ending = Ending.LEFT
    except ConnectionError:
        result.problems.append("the connection was reset")
    finally:
        writer.transport.abort()
        result.ended = loop.time()
    if result.ending is not Ending.LEFT:
        _judge(result, raw)
    return result


async def _read(reader: asyncio.StreamReader, what: Ask) -> bytes:
    parts: list[bytes] = []
    size = 0
    while data := await reader.read(512 if what.pause_s else 65_536):
        parts.append(data)
        size += len(data)
        if what.leave_after_bytes is not None and size >= what.leave_after_bytes:
            break
        if what.pause_s:
            await asyncio.sleep(what.pause_s)
    return b"".join(parts)


def _request(what: Ask) -> bytes:
    data = json.dumps(what.body).encode()
    lines = {"host": "test", "content-type": "application/json", "connection": "close", **what.headers}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"POST {what.path} HTTP/1.1\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _judge(result: Result, raw: bytes) -> None:
    head, blank, rest = raw.partition(b"\r\n\r\n")
    if not blank:
        result.problems.append(f"no whole head: {raw[:200]!r}")
        return
    lines = head.decode("latin-1").split("\r\n")
    result.status = int(lines[0].split(" ")[1])
    result.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    if result.headers.get("transfer-encoding") == "chunked":
        whole = _unchunk(result, rest)
    else:
        length = int(result.headers.get("content-length", "-1"))
        result.body, whole = rest, len(rest) == length
        if len(rest) > length:
            result.problems.append("bytes after the end of the answer")
    if not whole:
        result.problems.append("the answer is not complete")
        return
    if result.headers.get("content-type", "").startswith("text/event-stream"):
        _judge_stream(result)
    else:
        _judge_whole(result)


def _unchunk(result: Result, rest: bytes) -> bool:
    parts: list[bytes] = []
    at = 0
    while True:
        end = rest.find(b"\r\n", at)
        if end < 0:
            break
        size = int(rest[at:end], 16)
        data = rest[end + 2 : end + 2 + size]
        at = end + 4 + size
        if size == 0:
            result.body = b"".join(parts)
            if at < len(rest):
                result.problems.append("bytes after the last chunk")
            return at <= len(rest)
        parts.append(data)
        if at > len(rest):
            break
    result.body = b"".join(parts)
    return False


def _judge_whole(result: Result) -> None:
    try:
        answer = json.loads(result.body)
    except ValueError:
        result.problems.append("the body is not JSON")
        return
    if result.status != 200:
        result.ending = Ending.REFUSED if result.status < 500 else Ending.FAILED
        # SGLang's own errors stand at the top; what an engine says reaches the client as it is.
        error = answer if answer.get("object") == "error" else answer.get("error")
        if not isinstance(error, dict) or not error.get("message") or error.get("code") != result.status:
            result.problems.append("an error without the usual shape")
        return
    result.ending = Ending.ANSWERED
    result.usage = answer.get("usage")
    for choice in answer["choices"]:
        index = choice["index"]
        result.text[index] = choice["text"] if "text" in choice else choice["message"]["content"] or ""
        result.finish[index] = choice["finish_reason"]
    if not all(result.finish.values()):
        result.problems.append("a choice without a finish reason")


def _judge_stream(result: Result) -> None:
    if not result.body.endswith(b"\n\n"):
        result.problems.append("the stream does not end with a whole event")
        return
    events = result.body.split(b"\n\n")[:-1]
    if [e for e in events if e == b"data: [DONE]"] != [b"data: [DONE]"] or events[-1] != b"data: [DONE]":
        result.problems.append("not exactly one [DONE], at the end")
    errors = 0
    for event in events[:-1]:
        if errors:
            result.problems.append("an event after the error")
        data = json.loads(event.removeprefix(b"data: "))
        if "error" in data:
            errors += 1
            continue
        result.usage = data.get("usage") or result.usage
        for choice in data["choices"]:
            _add(result, choice)
    result.ending = Ending.BROKEN if errors else Ending.ANSWERED
    if not errors and (not result.finish or len(result.finish) != len(result.text)):
        result.problems.append(f"{len(result.text)} choices and {len(result.finish)} finish reasons")


def _add(result: Result, choice: dict[str, Any]) -> None:
    index = choice["index"]
    piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    if index in result.finish:
        result.problems.append(f"choice {index} goes on after its end")
    result.text[index] = result.text.get(index, "") + piece
    if choice.get("finish_reason"):
        result.finish[index] = choice["finish_reason"]
