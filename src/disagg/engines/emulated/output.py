"""Where answers go, and answers that go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from disagg.engines.emulated.faults import Faults
from disagg.http.messages import Header
from disagg.http.responder import Responder

HTML = b"<html><body><h1>It works!</h1></body></html>"
_encode = msgspec.json.Encoder().encode
# The bytes have to leave before the connection is reset.
_FLUSH_S = 0.02


class Output(Protocol):
    """Where an answer goes: the part of `Responder` that answers use."""

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """A whole answer."""
        ...

    def start(self, status: int, headers: Iterable[Header] = (), *, first: bytes = b"") -> None:
        """The head of a streamed answer."""
        ...

    def write(self, data: bytes) -> None:
        """More of it."""
        ...

    def finish(self, last: bytes = b"") -> None:
        """Its end."""
        ...


class FaultyOutput:
    """Changes an answer, sends it late, or cuts it, as it was told.

    Attributes:
        over: Set when nothing more will be sent and the answer counts as given.
    """

    def __init__(self, responder: Responder, faults: Faults) -> None:
        self._responder = responder
        self._faults = faults
        cuts = (faults.close_at_byte, faults.reset_at_byte, faults.hang_at_byte)
        self._left = min((cut for cut in cuts if cut is not None), default=None)
        self._cut = False
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def pump(self) -> None:
        """Send what was written, piece by piece; ends with the answer, or not at all if it hangs."""
        while not self._cut:
            data = await self._queue.get()
            if data is None:
                break
            if self._faults.chunk_delay_s:
                await asyncio.sleep(self._faults.chunk_delay_s)
            self._pass(data)
        if self._left is None:
            self._responder.finish()
            self.over.set_result(None)
        else:
            # A cut answer is never complete, however short it is: this ends when the connection does.
            self._end()
            await asyncio.get_running_loop().create_future()

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Announces the whole length."""
        if status == 200:
            body = HTML if self._faults.not_json else changed(body, self._faults)
        self._responder.start(status, self._claimed(headers), length=len(body))
        self._queue.put_nowait(body)
        self._queue.put_nowait(None)

    def start(self, status: int, headers: Iterable[Header] = (), *, first: bytes = b"") -> None:
        """The head is whole."""
        self._responder.start(status, self._claimed(headers))
        self.write(first)

    def write(self, data: bytes) -> None:
        """A piece."""
        if data:
            self._queue.put_nowait(self._streamed(data))

    def finish(self, last: bytes = b"") -> None:
        """The end."""
        self.write(last)
        self._queue.put_nowait(None)

    def _claimed(self, headers: Iterable[Header]) -> list[Header]:
        claimed = self._faults.content_type.encode()
        return [(name, claimed if claimed and name == b"content-type" else value) for name, value in headers]

    def _streamed(self, data: bytes) -> bytes:
        faults = self._faults
        if faults.not_json:
            return HTML
        if not faults.usage or b'"usage"' not in data:
            return data
        events = [event for event in data.split(b"\n\n") if event]
        return b"".join(self._event(event) + b"\n\n" for event in events)

    def _event(self, event: bytes) -> bytes:
        head, mark, data = event.partition(b"data: ")
        return head + mark + changed(data, self._faults) if data.startswith(b"{") else event

    def _pass(self, data: bytes) -> None:
        if self._left is None:
            self._responder.write(data)
            return
        self._responder.write(data[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self._end()

    def _end(self) -> None:
        if self._cut:
            return
        self._cut = True
        if self._faults.reset_at_byte is not None:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._responder.reset)
        elif self._faults.close_at_byte is not None:
            asyncio.get_running_loop().call_later(_FLUSH_S, self._responder.abort)


def changed(body: bytes, faults: Faults) -> bytes:
    """A JSON answer with the usage and the handoff parameters that the faults want."""
    if not (faults.usage or faults.handle):
        return body
    answer: dict[str, Any] = msgspec.json.decode(body)
    usage = answer.get("usage")
    if faults.usage == "missing":
        answer.pop("usage", None)
    elif faults.usage == "wrong" and isinstance(usage, dict):
        answer["usage"] = {key: n * 7 + 1 if isinstance(n, int) else n for key, n in usage.items()}
    params = answer.get("kv_transfer_params")
    if isinstance(params, dict):
        match faults.handle:
            case "missing":
                answer["kv_transfer_params"] = None
            case "partial":
                del params["remote_engine_id"]
            case "foreign":
                params["remote_engine_id"] = str(uuid4())
            case "empty":
                params["remote_block_ids"] = []
            case _:
                pass
    return _encode(answer)
