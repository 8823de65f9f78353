"""Who gets an answer, and what may change it on the way.

A client's connection (`disagg.http.responder.Responder`) is the usual sink; a part of a request that was fanned out
has one that collects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from disagg.engines.base import Api
from disagg.http.messages import Header


class Sink(Protocol):
    """Takes one answer: either `send`, or `start`, any number of `write`, and `finish`. Nothing of it blocks.

    Attributes:
        started: The client has been sent at least the status line.
        finished: The answer is complete, or was given up.
    """

    started: bool
    finished: bool

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Take a whole answer."""
        ...

    def start(
        self, status: int, headers: Iterable[Header] = (), *, length: int | None = None, first: bytes = b""
    ) -> None:
        """Take the head of an answer, with the first bytes of its body."""
        ...

    def write(self, data: bytes) -> None:
        """Take more of the body."""
        ...

    def framed_writer(self) -> Callable[[bytes], object] | None:
        """What takes more of the body that is framed as chunks already, until the answer is `finished`; or None."""
        ...

    def finish(self, last: bytes = b"") -> None:
        """Take the last bytes of the body, and the end."""
        ...

    def on_flow(self, callback: Callable[[bool], None] | None) -> None:
        """Call `callback(False)` when no more can be taken for now, and `callback(True)` when it can again."""
        ...


StreamFilter = Callable[[bytes], bytes]
"""Takes whole server-sent events, in pieces of any number of them, and returns what the client gets of them."""


@dataclass(frozen=True, slots=True)
class Merge:
    """How two answers become the client's one. Where this is None, decode's answer is the client's, byte for byte.

    Attributes:
        whole: Takes the API, prefill's answer and decode's answer, none of them streamed; returns the client's body.
        stream: Takes the API and prefill's answer; returns the filter for decode's stream.
    """

    whole: Callable[[Api, bytes, bytes], bytes]
    stream: Callable[[Api, bytes], StreamFilter]
