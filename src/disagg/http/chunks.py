"""Chunked transfer coding that can be passed on as it stands.

An engine sends each event of a stream as one chunk. If a read brought whole chunks and nothing else, their framing is
as good for the client as for us, so they go on as the bytes they are: neither parsed nor framed again.
"""

from __future__ import annotations

from types import MappingProxyType

# Chunk sizes as servers write them. A table reads them faster than `int(..., 16)`, which takes signs, underscores and
# blanks besides. Bigger chunks, and sizes written in another way, are left to the parser.
_SIZES = MappingProxyType({b"%x" % size: size for size in range(1, 4096)})


def are_whole_chunks(data: bytes) -> bool:
    """Whether `data` is one or more complete chunks, the last chunk (of size 0) not among them.

    The bytes must begin where a chunk begins. False may also mean that the answer would take longer than parsing.
    """
    position, end = 0, len(data)
    while True:
        line_end = data.find(b"\r\n", position, position + 5)
        size = _SIZES.get(data[position:line_end]) if line_end > 0 else None
        if size is None:
            return False
        position = line_end + size + 4
        if data[position - 2 : position] != b"\r\n":
            return False
        if position == end:
            return True
