"""Hashes that are the same in every process. Python's own `hash` of text and bytes is not."""

from __future__ import annotations

from hashlib import blake2b

_HASH_BYTES = 8
_SPAN = 2.0**64


def unit_hash(data: bytes) -> float:
    """A number from 0 to 1 that depends on nothing but `data`."""
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES).digest(), "big") / _SPAN


def chained_hash(parent: bytes, data: bytes) -> bytes:
    """The hash of a block that follows the block with hash `parent`: equal only if all blocks before are equal."""
    return blake2b(parent + data, digest_size=_HASH_BYTES).digest()
