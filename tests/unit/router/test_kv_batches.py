"""What engines publish is read in both of its spellings, and never believed when it makes no sense."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.kv_index import Cleared, Removed, Stored
from disagg.router.kv_batches import encode_extra, read_batch


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])


def block(**changed: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [b"h1", 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changed,
    }


STORED = Stored(("GPU", 0), [b"h1", 2], None, array("I", [1, 2, 3, 4]), 2, [b"", b""])


def test_maps_and_arrays_mean_the_same() -> None:
    """Newer and older engines."""
    maps = batch(
        block(), {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"}, {"type": "AllBlocksCleared"}
    )
    arrays = batch(
        ["BlockStored", [b"h1", 2], None, [1, 2, 3, 4], 2, None, "GPU", None],
        ["BlockRemoved", [2], "CPU"],
        ["AllBlocksCleared"],
    )
    wanted = [STORED, Removed(("CPU", 0), [2]), Cleared()]
    assert read_batch(maps) == read_batch(arrays) == (12.5, wanted)


def test_the_oldest_arrays_end_before_the_medium() -> None:
    """They mean the device's own memory."""
    assert read_batch(batch(["BlockStored", [b"h1", 2], None, [1, 2, 3, 4], 2])).events == [STORED]


def test_an_adapter_is_a_part_of_each_block_and_a_salt_of_the_first() -> None:
    """As the engine hashes them; the adapter's name alone is taken where extra keys are not told."""
    named = read_batch(batch(block(lora_name="sql"))).events[0]
    told = read_batch(batch(block(lora_name="sql", extra_keys=[["sql", "salt"], ["sql"]]))).events[0]
    assert isinstance(named, Stored)
    assert isinstance(told, Stored)
    assert named.extra == [encode_extra(["sql"])] * 2
    assert told.extra == [encode_extra(["sql", "salt"]), encode_extra(["sql"])]


@pytest.mark.parametrize(
    "event",
    [
        block(kv_cache_spec_kind="sliding_window"),
        block(kv_cache_spec_kind="mamba"),
        block(token_ids=[1, 2, 3]),
        block(locality="REMOTE"),
        {"type": "SomethingNew", "x": 1},
        [],
    ],
)
def test_what_says_nothing_about_whole_prefixes_is_left_out(event: object) -> None:
    """Windows, states, blocks that were skipped, other machines' caches, kinds of events that are not known."""
    assert read_batch(batch(event)).events == []


def test_caches_of_full_attention_are_taken() -> None:
    """Under each of the names that the engine has for them."""
    for kind in ("full_attention", "mla_attention", "sink_full_attention"):
        assert read_batch(batch(block(kv_cache_spec_kind=kind))).events == [STORED]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]),
        batch(7),
        batch(block(block_hashes=["text"])),
        batch(block(token_ids=[-1, 2, 3, 4])),
        batch(block(token_ids="abcd")),
        batch(block(extra_keys=[["sql"]])),
        batch({"type": "BlockRemoved"}),
    ],
)
def test_what_makes_no_sense_is_an_error(payload: bytes) -> None:
    """The publisher is then forgotten: half a batch is worse than none."""
    with pytest.raises(ValueError, match="KV event"):
        read_batch(payload)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none()
        | st.integers(-(2**63), 2**63)
        | st.text(max_size=5)
        | st.sampled_from(["BlockStored", "BlockRemoved"]),
        lambda inner: (
            st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(sorted(block())), inner, max_size=6)
        ),
        max_leaves=20,
    ).map(lambda value: msgspec.msgpack.encode([1.0, [value]]))
)
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    """No other error comes out of it."""
    try:
        read_batch(payload)
    except ValueError:
        return
