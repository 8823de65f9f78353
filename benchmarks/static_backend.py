"""A backend that costs almost nothing: fixed answers to prefill, decode and streamed legs, for router benchmarks.

Run as `python -m benchmarks.static_backend`; it prints its port and serves until its input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

CHUNKS = 100
"""Events of one streamed answer, without the terminator."""
PACE_S = 0.002
"""Time between two events of a stream."""

_PREFILL = json.dumps(
    {
        "id": "cmpl-p",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 200, "total_tokens": 201, "completion_tokens": 1},
        "kv_transfer_params": {
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
    },
    separators=(",", ":"),
).encode()
_DECODE = json.dumps(
    {
        "id": "cmpl-d",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": " word" * 64, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 200, "total_tokens": 264, "completion_tokens": 64},
        "kv_transfer_params": None,
    },
    separators=(",", ":"),
).encode()
EVENT = b'data: {"id":"cmpl-d","object":"text_completion","created":1,"choices":[{"index":0,"text":" w"}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"


def _whole(body: bytes) -> bytes:
    return _HEAD + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_PREFILL_ANSWER = _whole(_PREFILL)
_DECODE_ANSWER = _whole(_DECODE)
_STREAM_HEAD = _HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_EVENT = _chunk(EVENT)
_STREAM_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Static(asyncio.Protocol):
    """Answers each request by what stands in its body."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        start = self._data.index(b"content-length: ") + 16
        size = int(self._data[start : self._data.index(b"\r", start)])
        if len(self._data) < end + 4 + size:
            return
        body, self._data = self._data[end + 4 :], b""
        if b'"do_remote_decode":true' in body:
            self._transport.write(_PREFILL_ANSWER)
        elif b'"stream":true' in body:
            self._transport.write(_STREAM_HEAD)
            self._stream(CHUNKS)
        else:
            self._transport.write(_DECODE_ANSWER)

    def _stream(self, left: int) -> None:
        if left == 0:
            self._transport.write(_STREAM_END)
            return
        self._transport.write(_STREAM_EVENT)
        asyncio.get_running_loop().call_later(PACE_S, self._stream, left - 1)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Static, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
