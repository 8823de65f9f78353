"""One JSON line per request, written without ever holding up a request.

The event loop puts lines into a list; a thread of its own writes them, a few times a second. If whatever reads the
log falls behind, lines are dropped and counted, because the other choice is to stop serving. A line has names, times
and counts; nothing of what a client asked or was told, and no credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import BinaryIO

import msgspec

from disagg.http.messages import Request
from disagg.router.record import Record
from disagg.router.series import Counter

FLUSH_S = 0.25
MAX_WAITING = 10_000
"""Lines that wait to be written before further ones are dropped."""
_CLOSE_S = 5.0
# A pipe takes so many bytes at once without mixing them with those of other writers.
_PIECE = 4096
_MAX_TEXT = 512


class Line(msgspec.Struct, omit_defaults=True):
    """One line; fields without a value are left out.

    Attributes:
        time: When the request ended, RFC 3339 in UTC.
        request_id: The id that the client sees.
        client: Address of the client.
        method: HTTP method.
        target: HTTP path, without its query.
        status: HTTP status sent; 0 if the client left before.
        outcome: ok, refused, failed, broken, or client_left.
        path: Which way the request took.
        bytes_in: Length of the request's body.
        bytes_out: Length of the answer's body.
        total_s: From the complete request to the end of its answer, in seconds.
        first_byte_s: The same until the first byte of the answer's body.
        queue_s: How long it waited for a permit.
        prefill_s: How long the last prefill leg took.
        reason: Why it took another path than the disaggregated one.
        primed: Why its KV was handed over by a leg of its own.
        error: Why it was not served.
        detail: The same in words.
        prefill: Engine of the prefill leg.
        decode: Engine of the decode leg, or of the only one.
        retries: How often it was tried again.
        prompt_tokens: Length of the prompt, if an engine has told it.
        cached_tokens: How many of them prefill had in its cache.
        completion_tokens: Length of the answer, if an engine has told it.
        key: Name of the client's key.
        trace_id: Of the trace, if there is one.
    """

    time: str
    request_id: str
    client: str
    method: str
    target: str
    status: int
    outcome: str
    path: str
    bytes_in: int
    bytes_out: int
    total_s: float
    first_byte_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    reason: str = ""
    primed: str = ""
    error: str = ""
    detail: str = ""
    prefill: str = ""
    decode: str = ""
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    key: str = ""
    trace_id: str = ""


def make_line(record: Record, request: Request, ended_at: float, wall: float) -> Line:
    """The line of a request that ended at `ended_at` (monotonic seconds), which is `wall` in Unix time."""
    return Line(
        time=datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds"),
        request_id=record.public_id.decode("latin-1"),
        client=request.peer,
        method=request.method,
        target=request.path[:_MAX_TEXT],
        status=record.status,
        outcome=record.outcome,
        path=record.path,
        bytes_in=len(request.body),
        bytes_out=record.bytes_sent,
        total_s=round(ended_at - record.started_at, 6),
        first_byte_s=round(record.first_byte_at - record.started_at, 6) if record.first_byte_at else None,
        queue_s=round(record.queue_s, 6) if record.queue_s else None,
        prefill_s=round(record.prefill_s, 6) if record.prefill_s else None,
        reason=record.reason,
        primed=record.primed,
        error=record.error,
        detail=record.detail[:_MAX_TEXT],
        prefill=record.prefill,
        decode=record.decode,
        retries=record.retries,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        key=record.key,
        trace_id=record.trace_id,
    )


class AccessLog:
    """Writes lines to a stream. Bound to the event loop in which it is first used.

    Args:
        stream: Where to; only the writer's thread touches it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.dropped = Counter("disagg_access_log_dropped", "Lines of the access log that nobody took in time.")
        self._stream = stream
        self._encode: Callable[[Line], bytes] = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._wake = threading.Condition()
        self._batch: list[bytes] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, line: Line) -> None:
        """Write a line, soon."""
        self._lines.append(self._encode(line))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    async def close(self) -> None:
        """Write what waits, as long as the stream takes it within a few seconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._flush()
        thread = self._thread
        if thread is not None:
            with self._wake:
                self._stopping = True
                self._wake.notify()
            await asyncio.to_thread(thread.join, _CLOSE_S)

    def _flush(self) -> None:
        self._timer = None
        lines, self._lines = self._lines, []
        with self._wake:
            room = MAX_WAITING - len(self._batch)
            self.dropped.values[()] += max(0, len(lines) - room)
            self._batch += lines[:room]
            self._wake.notify()
        if self._thread is None:
            # A daemon: a reader that never reads must not keep the process from ending.
            self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        """The thread."""
        while True:
            with self._wake:
                while not self._batch and not self._stopping:
                    self._wake.wait()
                batch, self._batch = self._batch, []
                if not batch:
                    return
            for piece in _pieces(batch):
                # The reader is gone: there is nobody to tell, and requests go on.
                with contextlib.suppress(OSError, ValueError):
                    self._stream.write(piece)
                    self._stream.flush()


def _pieces(lines: list[bytes]) -> list[bytes]:
    """Whole lines, joined up to what a pipe takes at once."""
    pieces: list[bytes] = []
    current: list[bytes] = []
    size = 0
    for line in lines:
        if current and size + len(line) + 1 > _PIECE:
            pieces.append(b"\n".join([*current, b""]))
            current, size = [], 0
        current.append(line)
        size += len(line) + 1
    if current:
        pieces.append(b"\n".join([*current, b""]))
    return pieces
