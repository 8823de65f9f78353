"""Backends that cost almost nothing: fixed answers to prefill, decode and streamed legs, for router benchmarks.

Run as `python -m benchmarks.static_backend`; it prints a prefill port and a decode port and serves until its input
closes. The answers satisfy routers for vLLM's pull handoff (prefill returns ``kv_transfer_params``) and for SGLang's
bootstrap (both legs at once, prefill's answer is dropped) alike. A stream has ``max_tokens`` events, one every
``seed`` milliseconds: both are fields that every router passes on.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from functools import partial
from typing import cast

import uvloop


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _completion(name: str, text: str, tokens: int, params: dict[str, object] | None) -> bytes:
    return _compact(
        {
            "id": name,
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 200, "total_tokens": 200 + tokens, "completion_tokens": tokens},
            "kv_transfer_params": params,
        }
    )


_PREFILL = _completion(
    "cmpl-p",
    " a",
    1,
    {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "remote_engine_id": "8a1c8f4e-6a9e-4a4e-9d5c-2f0d0a3f9b11",
        "remote_request_id": "cmpl-8f1d-0-0a1b2c3d",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 200,
        "transfer_mode": "pull",
    },
)
_DECODE = _completion("cmpl-d", " word" * 64, 64, None)
WHOLE_END = b'"kv_transfer_params":null}'
"""How an answer that is not streamed ends."""
EVENT = b'data: {"id":"cmpl-d","object":"text_completion","created":1,"choices":[{"index":0,"text":" w"}]}\n\n'
_INFO = _compact({"status": "ok", "model_path": "m", "model_id": "m", "object": "list", "data": [{"id": "m"}]})
_HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"


def _whole(body: bytes) -> bytes:
    return _HEAD + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_PREFILL_ANSWER = _whole(_PREFILL)
_DECODE_ANSWER = _whole(_DECODE)
_INFO_ANSWER = _whole(_INFO)
_STREAM_HEAD = _HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_EVENT = _chunk(EVENT)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_UNKNOWN_ANSWER = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
_SERVED = (b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_EVENTS = re.compile(rb'"max_tokens": *(\d+)')
_PACE = re.compile(rb'"seed": *(\d+)')


class _Static(asyncio.Protocol):
    """Answers each request by the stage of its port, and by whether it wants a stream."""

    def __init__(self, prefill: bool) -> None:
        self._prefill = prefill
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            found = _LENGTH.search(self._data, 0, end)
            after = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < after:
                return
            served = self._data.startswith(_SERVED)
            body, self._data = self._data[end + 4 : after], self._data[after:]
            if served:
                self._answer(body)
            else:
                # A path that only some engines have, such as one that renders a prompt without running it.
                self._transport.write(_INFO_ANSWER if not body else _UNKNOWN_ANSWER)

    def _answer(self, body: bytes) -> None:
        write = self._transport.write
        if b'"stream":true' not in body:
            write(_PREFILL_ANSWER if self._prefill else _DECODE_ANSWER)
        elif self._prefill:
            write(_STREAM_HEAD + _STREAM_EVENT + _STREAM_END)
        else:
            events, pace = _EVENTS.search(body), _PACE.search(body)
            write(_STREAM_HEAD)
            self._stream(int(events[1]) if events else 1, int(pace[1]) / 1e3 if pace else 0.0)

    def _stream(self, left: int, pace_s: float) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(_STREAM_END)
            return
        self._transport.write(_STREAM_EVENT)
        asyncio.get_running_loop().call_later(pace_s, self._stream, left - 1, pace_s)


async def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(partial(_Static, prefill), "127.0.0.1", 0, backlog=4096) for prefill in (True, False)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
