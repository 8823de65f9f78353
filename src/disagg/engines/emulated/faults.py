"""Faults that an emulated engine can be told to have, at the start or while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from disagg.errors import BadRequestError
from disagg.http.messages import Request


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests a fault is for; all that is given has to hold.

    Attributes:
        path: Beginning of the path.
        body: Text that the body contains.
        header: Name and value of a header, as ``name: value``.
    """

    path: str = ""
    body: str = ""
    header: str = ""

    def hits(self, request: Request) -> bool:
        """Whether the fault is for this request."""
        if not request.path.startswith(self.path) or self.body.encode() not in request.body:
            return False
        if not self.header:
            return True
        name, _, value = self.header.partition(":")
        return request.header(name.strip().lower().encode()) == value.strip().encode()


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong with requests that generate. Everything is off by default.

    Attributes:
        match: Which requests are hit; without it all are.
        after: So many requests that match pass unharmed first.
        requests: How many requests the fault hits then; 0 means all.
        for_s: How many seconds the fault is in force; 0 means until it is taken back.
        delay_s: Seconds before the answer's headers; the request is accepted and computed after that.
        status: Answer with this HTTP status and an error body, instead of computing.
        body: Text to answer with in place of that error body.
        retry_after_s: `Retry-After` of that answer in seconds; 0 sends none.
        silent: Never answer, and leave the connection open; nothing is computed.
        chunk_delay_s: Seconds before each piece of the answer's body.
        close_at_byte: Close the connection once so many bytes of the answer's body have been sent.
        reset_at_byte: The same with a TCP reset.
        hang_at_byte: Send nothing more after so many bytes of the body, and leave the connection open.
        content_type: Content type to claim.
        not_json: Send a page of HTML as the body, with the status and headers of the true answer.
        usage: Leave usage out, or report numbers that are wrong.
        no_handle: Prefill keeps nothing and says so, as an engine without a connector.
        handle: Prefill keeps the KV and returns no parameters, or some without the engine's id, or with the id of
            an engine that is not there, or without blocks.
        transfer_s: Seconds that every KV load takes on top.
        transfer_bytes_per_s: Speed of KV loads; 0 is as fast as it goes.
        transfer: KV loads fail, or bring the first half and then nothing more, or bring wrong content.
        notice: The notice that KV was read is not sent, is sent twice, or only after the time of `notice_delay_s`.
        notice_delay_s: Seconds by which a late notice is late.
        free_early: Blocks of a request that is aborted during its load are free at once, although the load goes on
            writing into them.
    """

    match: Match = Match()
    after: int = 0
    requests: int = 0
    for_s: float = 0.0
    delay_s: float = 0.0
    status: int = 0
    body: str | None = None
    retry_after_s: int = 0
    silent: bool = False
    chunk_delay_s: float = 0.0
    close_at_byte: int | None = None
    reset_at_byte: int | None = None
    hang_at_byte: int | None = None
    content_type: str = ""
    not_json: bool = False
    usage: Literal["", "missing", "wrong"] = ""
    no_handle: bool = False
    handle: Literal["", "missing", "partial", "foreign", "empty"] = ""
    transfer_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    transfer: Literal["", "lost", "half", "corrupt"] = ""
    notice: Literal["", "lost", "duplicate", "late"] = ""
    notice_delay_s: float = 0.0
    free_early: bool = False

    @property
    def rewrites(self) -> bool:
        """The answer does not reach the client as it was written."""
        cuts = (self.close_at_byte, self.reset_at_byte, self.hang_at_byte)
        return any(cut is not None for cut in cuts) or bool(
            self.chunk_delay_s or self.content_type or self.not_json or self.usage or self.handle
        )


NONE = Faults()


def read_faults(body: bytes) -> tuple[Faults, ...]:
    """Faults from JSON: one object, or a list of them.

    Raises:
        BadRequestError: If a key is unknown or a value has the wrong type or range.
    """
    try:
        if body.lstrip().startswith(b"["):
            given = msgspec.json.decode(body, type=tuple[Faults, ...])
        else:
            given = (msgspec.json.decode(body, type=Faults),)
    except msgspec.DecodeError as error:
        keys = ", ".join(Faults.__struct_fields__)
        raise BadRequestError(f"Not a fault description: {error}.", hint=f"Keys: {keys}.") from error
    for faults in given:
        _check(faults)
    return given


def _check(faults: Faults) -> None:
    numbers = [getattr(faults, name) for name in faults.__struct_fields__ if name not in {"status", "match"}]
    if any(isinstance(number, int | float) and not 0 <= number < float("inf") for number in numbers):
        raise BadRequestError("Times and counts of a fault must not be negative.")
    if faults.status and not 400 <= faults.status <= 599:
        raise BadRequestError(f"A fault's status must be from 400 to 599, got {faults.status}.")
    if faults.match.header and ":" not in faults.match.header:
        raise BadRequestError(f"A fault's header must be 'name: value', got {faults.match.header!r}.")


class _Rule:
    """One fault with what is left of its counts."""

    def __init__(self, faults: Faults, now: float) -> None:
        self.faults = faults
        self.skip = faults.after
        self.left = faults.requests
        self.ends = now + faults.for_s if faults.for_s else float("inf")


class FaultBox:
    """The faults in force. For a request the first that matches counts.

    Args:
        given: Faults from the start.
        now: A clock, in seconds.
    """

    def __init__(self, given: tuple[Faults, ...], now: Callable[[], float]) -> None:
        self._now = now
        self._rules: list[_Rule] = []
        self._given = given

    def arm(self) -> None:
        """The engine starts: faults that it was given count from now."""
        self.set(self._given)

    def set(self, given: tuple[Faults, ...]) -> None:
        """Replace them."""
        now = self._now()
        self._rules = [_Rule(faults, now) for faults in given]

    @property
    def current(self) -> tuple[Faults, ...]:
        """What is in force."""
        return tuple(rule.faults for rule in self._rules)

    def take(self, request: Request) -> Faults:
        """The faults of a request."""
        if not self._rules:
            return NONE
        self._expire()
        for rule in self._rules:
            if not rule.faults.match.hits(request):
                continue
            if rule.skip:
                rule.skip -= 1
                continue
            if rule.faults.requests:
                rule.left -= 1
                if rule.left == 0:
                    self._rules.remove(rule)
            return rule.faults
        return NONE

    def _expire(self) -> None:
        now = self._now()
        self._rules = [rule for rule in self._rules if rule.ends > now]

    def transfers(self) -> Faults:
        """The faults of KV loads: the first in force that has any, whatever requests it is for."""
        if not self._rules:
            return NONE
        self._expire()
        for rule in self._rules:
            faults = rule.faults
            if faults.transfer_s or faults.transfer_bytes_per_s or faults.transfer or faults.notice:
                return faults
        return NONE

    def frees_early(self) -> bool:
        """Blocks of an aborted load are not kept from others."""
        return any(rule.faults.free_early for rule in self._rules)
