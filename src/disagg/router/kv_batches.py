"""What engines publish about their KV caches, read from its bytes.

A batch is MessagePack, `[timestamp, [event, ...], rank]`. Newer engines write an event as a map with its `type`,
older ones as an array that begins with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from disagg.policy.kv_index import BlockHash, Cleared, Event, Removed, Stored

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Fields of an event that is an array, in their order after its type."""


class Batch(NamedTuple):
    """Events that an engine published together.

    Attributes:
        time: When, by the engine's clock, in seconds.
        events: Those that matter for the index, in their order.
    """

    time: float
    events: list[Event]


def encode_extra(keys: Sequence[object]) -> bytes:
    """What decides about a block's KV besides tokens, as the index compares it."""
    return msgspec.msgpack.encode(keys) if keys else b""


def read_batch(payload: bytes) -> Batch:
    """Read a batch.

    Raises:
        ValueError: If it is not what an engine publishes.
    """
    try:
        parts = msgspec.msgpack.decode(payload)
        if not isinstance(parts, list) or len(parts) < 2:
            raise ValueError("a batch of KV events is not a list of time and events")
        time, events = float(parts[0]), parts[1]
        read = [event for item in events if (event := _event(item)) is not None]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"the KV events cannot be read: {error!r}") from error
    return Batch(time, read)


def _event(item: Any) -> Event | None:
    if isinstance(item, list):
        kind = item[0] if item else None
        fields = dict(zip(_FIELDS.get(kind, ()), item[1:], strict=False)) if isinstance(kind, str) else {}
    elif isinstance(item, dict):
        kind, fields = item.get("type"), item
    else:
        raise ValueError("a KV event is neither a map nor an array")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in _FIELDS or fields.get("locality") == "REMOTE":
        return None
    place = (str(fields.get("medium") or "GPU"), int(fields.get("group_idx") or 0))
    hashes = _hashes(fields["block_hashes"])
    return Removed(place, hashes) if kind == "BlockRemoved" else _stored(place, hashes, fields)


def _stored(place: tuple[str, int], hashes: Sequence[BlockHash], fields: Mapping[str, Any]) -> Stored | None:
    size, count = int(fields["block_size"]), len(hashes)
    tokens = array("I", fields["token_ids"])
    if not _whole_prefix(fields.get("kv_cache_spec_kind")) or size < 1 or len(tokens) != size * count:
        return None
    lora = fields.get("lora_name")
    extra = fields.get("extra_keys") or [[lora] if lora else None] * count
    if len(extra) != count:
        raise ValueError(f"a KV event has {count} blocks and extra keys of {len(extra)}")
    parent = fields.get("parent_block_hash")
    parents = () if parent is None else _hashes([parent])
    return Stored(
        place, hashes, parents[0] if parents else None, tokens, size, [encode_extra(k) if k else b"" for k in extra]
    )


def _whole_prefix(kind: object) -> bool:
    """Whether such a cache holds all of a prefix: one with a window or a state does not tell how far it is."""
    return kind is None or (isinstance(kind, str) and ("full" in kind or "mla" in kind))


def _hashes(values: Any) -> Sequence[BlockHash]:
    if not isinstance(values, list) or not all(isinstance(v, int | bytes) for v in values):
        raise ValueError("a KV event's block hashes are neither numbers nor bytes")
    return values
