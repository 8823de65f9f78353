"""The short way of a stream: what an engine sends as whole events in whole chunks goes to the client in one call.

This runs once per token of every stream, so it is one function without helpers; whatever is not plain takes the long
way, through `disagg.router.relay.EventRelay`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from disagg.http.chunks import LONGEST, SINGLE, payload_size
from disagg.router.series import Buckets
from disagg.router.sink import Sink

_EVENT_END = b"\n\n"
_CHUNK_END = b"\n\n\r\n"


class Passage:
    """What has gone to one client of a stream, by either way, and when.

    Args:
        mark: What an event has in it that must not take the short way.
        now: Monotonic seconds.

    Attributes:
        last: The last piece, with or without its framing.
        before: The one before it.
        size: Bytes that have gone, without framing.

    All three are of the engine's stream that is under way: see `restart`.
    """

    __slots__ = ("_at", "_buckets", "_client", "_mark", "_now", "_write", "before", "last", "size")

    def __init__(self, mark: bytes, now: Callable[[], float]) -> None:
        self.last = b""
        self.before = b""
        self.size = 0
        self._mark = mark
        self._now = now
        self._at = 0.0
        self._buckets: Buckets
        self._client: Sink
        self._write: Callable[[bytes], object] | None = None

    def restart(self) -> None:
        """A stream of an engine begins: the request's first, or one that goes on where another broke."""
        self.last = b""
        self.before = b""
        self.size = 0
        self._write = None

    def begin(self, buckets: Buckets, at: float) -> None:
        """The client has been sent the first piece: times between this and later ones go into `buckets`."""
        self._buckets = buckets
        self._at = at

    def open(self, client: Sink) -> None:
        """Let what is plain take the short way, if the client's answer is sent in chunks."""
        self._client = client
        self._write = client.framed_writer()

    def close(self) -> None:
        """Let everything take the long way."""
        self._write = None

    def interrupt(self) -> None:
        """The client does not read: the time until the next piece is not the engine's."""
        self._at = 0.0

    def note(self, size: int) -> None:
        """So many bytes have gone the long way."""
        now = self._now()
        if self._at:
            self._buckets.observe(now - self._at)
        self._at = now
        self.size += size

    def silent_s(self) -> float:
        """Seconds since something went."""
        return self._now() - self._at

    def take(self, data: bytes) -> bool:
        """Pass whole chunks on with their framing, if they are whole events in which nothing has to be noticed.

        Args:
            data: Bytes that begin where a chunk and an event begin.

        Returns:
            False if they have to go the long way: then nothing was sent.
        """
        write = self._write
        if write is None or self._client.finished:
            return False
        length = len(data)
        head, size = SINGLE[length if length <= LONGEST else 0]
        if data.startswith(head):
            if not data.endswith(_CHUNK_END):
                return False
        else:
            size = payload_size(data, _EVENT_END)
            if not size:
                return False
        # `in` would be slower by half of all of this: it first asks whether the mark is a number.
        if data.find(self._mark) >= 0:
            return False
        write(data)
        now = self._now()
        at = self._at
        if at:
            # What `Buckets.observe` does, without the call.
            buckets = self._buckets
            gap = now - at
            buckets.counts[bisect_left(buckets.bounds, gap)] += 1
            buckets.total += gap
        self._at = now
        self.size += size
        self.before = self.last
        self.last = data
        return True
