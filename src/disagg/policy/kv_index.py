"""Which engine holds which KV blocks, kept up from what the engines publish.

An engine names its blocks by hashes of its own making. They are not reproduced here: each event brings the block's
tokens and its parent, so every block gets a chained hash of ours, and a prompt is cut and hashed the same way. Blocks
whose beginning is not known cannot be compared with a prompt and are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from disagg.policy.stable_hash import chained_hash

BlockHash = int | bytes
"""An engine's name of a block."""
Place = tuple[str, int]
"""Medium (GPU, CPU, ...) and group of KV caches that a block is in; an engine's hash is unique only inside of one."""


class Stored(NamedTuple):
    """Blocks that follow each other were put into a cache.

    Attributes:
        place: Where they are.
        hashes: The engine's names of them.
        parent: The engine's name of the block before the first; None at the beginning of a prompt.
        tokens: Their tokens, `block_size` for each.
        block_size: Tokens per block.
        extra: For each block what decides about its KV besides tokens (adapter, media, salt); empty for nothing.
    """

    place: Place
    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: array[int]
    block_size: int
    extra: Sequence[bytes]


class Removed(NamedTuple):
    """Blocks were put out of a cache."""

    place: Place
    hashes: Sequence[BlockHash]


class Cleared(NamedTuple):
    """A publisher's caches are empty."""


Event = Stored | Removed | Cleared


class Prompt(NamedTuple):
    """What is looked up.

    Attributes:
        tokens: The prompt's token ids.
        first_extra: What `Stored.extra` would be for its first block.
        extra: What it would be for all others.
    """

    tokens: array[int]
    first_extra: bytes = b""
    extra: bytes = b""


class _Publisher:
    """Blocks of one publisher.

    Attributes:
        name: The instance that it belongs to.
        blocks: By place, the engine's names of blocks with our key and how many copies there are: two requests that
            compute the same block at the same time leave two of them, and each is told of when it comes and goes.
        places: In how many places a key is held.
        block_size: Of the blocks that are indexed; 0 before the first one.
    """

    __slots__ = ("block_size", "blocks", "name", "places")

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[Place, dict[BlockHash, tuple[bytes, int]]] = {}
        self.places: dict[bytes, int] = {}
        self.block_size = 0

    def key_of(self, name: BlockHash) -> bytes | None:
        """Our key of a block, wherever it is."""
        for place in self.blocks.values():
            block = place.get(name)
            if block is not None:
                return block[0]
        return None


class KvIndex:
    """KV blocks by publisher. An engine has one publisher per data-parallel rank.

    Args:
        max_blocks: Most blocks of all publishers together.

    Attributes:
        left_out: Blocks that could not be indexed because there were too many.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._publishers: dict[tuple[str, int], _Publisher] = {}
        self._holders: dict[bytes, tuple[_Publisher, ...]] = {}
        self._blocks = 0
        self.left_out = 0

    def __len__(self) -> int:
        return self._blocks

    def apply(self, name: str, rank: int, event: Event) -> None:
        """A publisher told something. Events of one publisher have to come in order and without a gap.

        Args:
            name: The instance.
            rank: Its data-parallel rank.
            event: What it told.
        """
        publisher = self._publishers.get((name, rank))
        if publisher is None:
            publisher = self._publishers[name, rank] = _Publisher(name)
        if isinstance(event, Stored):
            self._store(publisher, event)
        elif isinstance(event, Removed):
            self._remove(publisher, event)
        else:
            self.forget(name, rank)

    def forget(self, name: str, rank: int) -> None:
        """A publisher is gone, or what it holds is no longer known."""
        publisher = self._publishers.pop((name, rank), None)
        if publisher is not None:
            for key in publisher.places:
                self._drop(publisher, key)
            self._blocks -= len(publisher.places)

    def held(self, name: str) -> int:
        """Blocks that an instance is known to hold."""
        return sum(len(p.places) for p in self._publishers.values() if p.name == name)

    def matched(self, prompt: Prompt) -> dict[str, int]:
        """Tokens from the prompt's beginning that an instance holds, by name; those without any are left out."""
        result: dict[str, int] = {}
        for size in {p.block_size for p in self._publishers.values() if p.block_size}:
            depth = 0
            alive: set[_Publisher] | None = None
            for key in _keys(prompt, size):
                holders = [p for p in self._holders.get(key, ()) if p.block_size == size]
                # Whoever misses a block in between holds nothing that follows: attention needs all of it.
                alive = set(holders) if alive is None else alive.intersection(holders)
                if not alive:
                    break
                depth += size
                for publisher in alive:
                    result[publisher.name] = max(depth, result.get(publisher.name, 0))
        return result

    def _store(self, publisher: _Publisher, event: Stored) -> None:
        size = event.block_size
        if not publisher.block_size:
            publisher.block_size = size
        if size != publisher.block_size:
            return  # a block that is filled in part; what it holds is told again when it is full
        key = b"" if event.parent is None else publisher.key_of(event.parent)
        if key is None:
            return
        blocks = publisher.blocks.setdefault(event.place, {})
        packed = event.tokens.tobytes()
        width = size * event.tokens.itemsize
        for index, name in enumerate(event.hashes):
            key = chained_hash(key, packed[index * width : (index + 1) * width] + event.extra[index])
            known = blocks.get(name)
            if known is not None and known[0] == key:
                blocks[name] = (key, known[1] + 1)
                continue
            if known is not None:
                # The name stands for another block now, so the old one is gone.
                self._release(publisher, known[0])
                del blocks[name]
            if not self._hold(publisher, key):
                self.left_out += len(event.hashes) - index
                return
            blocks[name] = (key, 1)

    def _remove(self, publisher: _Publisher, event: Removed) -> None:
        blocks = publisher.blocks.get(event.place)
        if blocks is None:
            return
        for name in event.hashes:
            known = blocks.get(name)
            if known is None:
                continue
            if known[1] > 1:
                blocks[name] = (known[0], known[1] - 1)
            else:
                del blocks[name]
                self._release(publisher, known[0])

    def _hold(self, publisher: _Publisher, key: bytes) -> bool:
        """Note one more place of a block; False if there is no room for another block."""
        count = publisher.places.get(key, 0)
        if count == 0:
            if self._blocks >= self._max_blocks:
                return False
            self._blocks += 1
            self._holders[key] = (*self._holders.get(key, ()), publisher)
        publisher.places[key] = count + 1
        return True

    def _release(self, publisher: _Publisher, key: bytes) -> None:
        count = publisher.places[key] - 1
        if count:
            publisher.places[key] = count
        else:
            del publisher.places[key]
            self._blocks -= 1
            self._drop(publisher, key)

    def _drop(self, publisher: _Publisher, key: bytes) -> None:
        rest = tuple(p for p in self._holders[key] if p is not publisher)
        if rest:
            self._holders[key] = rest
        else:
            del self._holders[key]


def _keys(prompt: Prompt, size: int) -> Iterator[bytes]:
    """Keys of a prompt's whole blocks, made one by one: most prompts are held by nobody beyond the first few."""
    packed = prompt.tokens.tobytes()
    width = size * prompt.tokens.itemsize
    key = b""
    extra = prompt.first_extra
    for begin in range(0, len(packed) - width + 1, width):
        key = chained_hash(key, packed[begin : begin + width] + extra)
        yield key
        extra = prompt.extra
