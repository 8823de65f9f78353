"""Chunked transfer coding that can be passed on as it stands.

An engine sends each event of a stream as one chunk. If a read brought whole chunks and nothing else, their framing is
as good for the client as for us, so they go on as the bytes they are: neither parsed nor framed again.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

_SIZES = range(1, 4096)
# Chunk sizes as servers write them. A table reads them faster than `int(..., 16)`, which takes signs, underscores and
# blanks besides. Bigger chunks, and sizes written in another way, are left to the parser.
_BY_LINE = MappingProxyType({b"%x" % size: size for size in _SIZES})
_BY_LENGTH = {len(b"%x" % size) + 4 + size: (b"%x\r\n" % size, size) for size in _SIZES}
_NO_CHUNK = (b"\n", 0)

LONGEST = max(_BY_LENGTH)
SINGLE = tuple(_BY_LENGTH.get(length, _NO_CHUNK) for length in range(LONGEST + 1))
"""By the length of one framed chunk: how it begins, and the size of its payload. Bytes of that length which begin so,
and end with a line break, are that one chunk. A length that no chunk has goes with a beginning that none has."""


class Taker(Protocol):
    """What is offered whole chunks before they are parsed.

    Attributes:
        size: Bytes of payload that it has taken or seen; grows.
    """

    size: int

    def take(self, data: bytes) -> bool:
        """Take bytes that begin where a chunk begins, or leave all of them to the parser."""
        ...

    def silent_s(self) -> float:
        """Seconds since it has last taken something."""
        ...


def payload_size(data: bytes, ending: bytes = b"") -> int:
    """How many bytes are in `data` apart from framing, if it is nothing but complete chunks; 0 if it is not.

    The bytes must begin where a chunk begins. 0 may also mean that the answer would take longer than parsing: for
    chunks that are not written as servers usually do, or do not end with `ending`; and the last chunk (of size 0) is
    always the parser's.
    """
    position, end, total = 0, len(data), 0
    after = ending + b"\r\n"
    while True:
        line_end = data.find(b"\r\n", position, position + 5)
        size = _BY_LINE.get(data[position:line_end]) if line_end > 0 else None
        if size is None:
            return 0
        position = line_end + size + 4
        if position > end or not data.endswith(after, line_end + 2, position):
            return 0
        total += size
        if position == end:
            return total
