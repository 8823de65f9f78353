"""Faults that an emulated engine can be told to have, at the start or while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

import msgspec

from disagg.errors import BadRequestError
from disagg.http.messages import Header
from disagg.http.responder import Responder


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong with requests to `/v1/...`. Everything is off by default.

    Attributes:
        delay_s: Seconds before the answer's headers; the request is accepted and computed after that.
        status: Answer with this HTTP status and an error body, instead of computing.
        close_at_byte: Close the connection once so many bytes of the answer's body have been sent.
        hang_at_byte: Send nothing more after so many bytes of the body, and leave the connection open.
        no_handle: A prefill answer comes without `kv_transfer_params`, as from an engine without a connector.
        transfer_s: Seconds that every KV load takes on top.
        requests: How many requests the fault hits; 0 means all.
    """

    delay_s: float = 0.0
    status: int = 0
    close_at_byte: int | None = None
    hang_at_byte: int | None = None
    no_handle: bool = False
    transfer_s: float = 0.0
    requests: int = 0


def read_faults(body: bytes) -> Faults:
    """Faults from JSON.

    Raises:
        BadRequestError: If a key is unknown or a value has the wrong type or range.
    """
    try:
        faults = msgspec.json.decode(body, type=Faults)
    except msgspec.DecodeError as error:
        keys = ", ".join(Faults.__struct_fields__)
        raise BadRequestError(f"Not a fault description: {error}.", hint=f"Keys: {keys}.") from error
    counts = (faults.requests, faults.close_at_byte or 0, faults.hang_at_byte or 0)
    if faults.delay_s < 0 or faults.transfer_s < 0 or min(counts) < 0:
        raise BadRequestError("Times and counts of a fault must not be negative.")
    if faults.status and not 400 <= faults.status <= 599:
        raise BadRequestError(f"A fault's status must be from 400 to 599, got {faults.status}.")
    return faults


class FaultBox:
    """The faults in force."""

    def __init__(self, faults: Faults) -> None:
        self.current = faults
        self._left = faults.requests

    def set(self, faults: Faults) -> None:
        """Replace them."""
        self.current = faults
        self._left = faults.requests

    def take(self) -> Faults:
        """The faults of the next request."""
        faults = self.current
        if faults.requests:
            self._left -= 1
            if self._left == 0:
                self.set(Faults())
        return faults


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


class CutOutput:
    """Sends so many bytes of a body, then closes the connection in the middle of the answer, or falls silent."""

    # The bytes have to leave before the connection is reset.
    _FLUSH_S = 0.02

    def __init__(self, responder: Responder, allowed: int, *, close: bool) -> None:
        self._responder = responder
        self._left = allowed
        self._closes = close
        self._cut = False

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Announces the whole length and sends a part."""
        self._responder.start(status, headers, length=len(body))
        self._pass(body)
        self._end()

    def start(self, status: int, headers: Iterable[Header] = (), *, first: bytes = b"") -> None:
        """The head is whole."""
        self._responder.start(status, headers)
        self._pass(first)

    def write(self, data: bytes) -> None:
        """What is still allowed."""
        self._pass(data)

    def finish(self, last: bytes = b"") -> None:
        """Never reached as an end: a short answer is cut too."""
        self._pass(last)
        self._end()

    def _pass(self, data: bytes) -> None:
        if self._cut:
            return
        self._responder.write(data[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self._end()

    def _end(self) -> None:
        if not self._cut:
            self._cut = True
            if self._closes:
                asyncio.get_running_loop().call_later(self._FLUSH_S, self._responder.abort)
