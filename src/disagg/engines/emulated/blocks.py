"""The KV pool of one engine: numbered blocks with content, shared by reference, cached by prefix, pinned by lease.

Life of a block: free -> allocated (one reference per owner) -> free again when the last owner lets go. A free block
keeps its content and its place in the prefix cache until it is allocated anew, so a reader that comes too late
finds old or foreign content and no error, as on a real engine.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from disagg.engines.emulated.cache_events import CacheLog
from disagg.engines.emulated.model import MASK


class BlockPool:
    """A finite number of blocks.

    Args:
        num_blocks: Blocks in the pool; ids are 0 to this minus 1.
        block_size: Tokens per block.
        caching: Keep full blocks findable by the tokens that lead to them.

    Attributes:
        log: Is told what becomes findable and what no longer is; None if nobody wants to know.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self._refs = [0] * num_blocks
        # Insertion order is the order of reuse: what was freed first is overwritten first.
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        # Per slot: content of this block up to and including the slot. A masked read of any length is one look-up.
        self._cells = array("Q", bytes(8 * num_blocks * block_size))
        self._by_key: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self.log: CacheLog | None = None

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that is in use or pinned, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks, or None if there are not that many. Their old content stays until it is written over."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None and self._by_key.get(key) == block:
                del self._by_key[key]
                if self.log is not None:
                    self.log.removed(key)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that were found in the prefix cache."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block. The end of a sequence becomes reusable before its beginning."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def find(self, keys: Iterable[int]) -> list[int]:
        """The longest run of cached blocks for these prefix keys."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def remember(self, block: int, key: int) -> bool:
        """Make a full block findable; whether it is new. The first block with a key keeps it."""
        if self._caching and key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key
            return True
        return False

    def forget(self) -> None:
        """Empty the prefix cache; blocks that are in use stay."""
        self._by_key.clear()
        self._key_of.clear()
        if self.log is not None:
            self.log.cleared()

    def context(self, blocks: Sequence[int], length: int) -> int:
        """Sum of the KV content of the first `length` positions, read from the blocks now."""
        if length == 0:
            return 0
        size, cells = self.block_size, self._cells
        full, rest = divmod(length, size)
        total = sum([cells[block * size + size - 1] for block in blocks[:full]])
        if rest:
            total += cells[blocks[full] * size + rest - 1]
        return total & MASK

    def write(self, blocks: Sequence[int], start: int, before: int, sums: Sequence[int]) -> None:
        """Store KV.

        Args:
            blocks: The sequence's blocks.
            start: First position to write.
            before: Sum of the content of all positions before `start`.
            sums: For each position the sum of content up to and including it.
        """
        size, cells = self.block_size, self._cells
        done, count = 0, len(sums)
        slot = start % size
        base = before - (cells[blocks[start // size] * size + slot - 1] if slot else 0)
        while done < count:
            position = start + done
            slot = position % size
            chunk = sums[done : done + size - slot]
            cell = blocks[position // size] * size + slot
            cells[cell : cell + len(chunk)] = array("Q", [(total - base) & MASK for total in chunk])
            base = chunk[-1]
            done += len(chunk)

    def read_raw(self, blocks: Sequence[int]) -> bytes:
        """Content of blocks as a peer reads it, eight bytes per slot.

        Raises:
            IndexError: If an id is outside the pool.
        """
        size = self.block_size
        if any(not 0 <= block < self.num_blocks for block in blocks):
            raise IndexError(f"block ids must be from 0 to {self.num_blocks - 1}")
        return b"".join(self._cells[block * size : block * size + size].tobytes() for block in blocks)

    def write_raw(self, blocks: Sequence[int], data: bytes, remote_block_size: int) -> None:
        """Store what was read from a peer, block by block, also where the peer's blocks are smaller than ours.

        A smaller block fills the beginning of ours and leaves the rest as it was: wrong content without an error,
        which is what a real engine does with unequal block sizes.
        """
        size = self.block_size
        incoming = array("Q")
        incoming.frombytes(data)
        width = min(size, remote_block_size)
        for index, block in enumerate(blocks):
            begin = index * remote_block_size
            chunk = incoming[begin : begin + width]
            self._cells[block * size : block * size + len(chunk)] = chunk


def root_key(salt: str) -> int:
    """Key of the empty prefix; prompts with different salts share nothing."""
    # Not Python's hash of a text, which differs from process to process.
    return zlib.crc32(salt.encode()) if salt else 0


def next_key(key: int, tokens: Sequence[int]) -> int:
    """Key of a full block that follows the prefix with this key."""
    return hash((key, tuple(tokens)))


def prefix_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Keys of the full blocks of a prompt; each depends on everything before it and on the salt."""
    keys = []
    key = root_key(salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = next_key(key, tokens[start : start + block_size])
        keys.append(key)
    return keys


@dataclass(slots=True)
class Leases:
    """KV that finished prompts keep for a decode engine, each until collected or until its lease ends.

    Attributes:
        duration_s: Length of a new lease.
        expired: Leases that ended uncollected.
        late: Notices of a reader about a lease that was gone: it may have read foreign content.
    """

    duration_s: float
    expired: int = 0
    late: int = 0
    _held: dict[str, tuple[float, list[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, request_id: str, blocks: list[int], now: float) -> None:
        """Hold a finished request's blocks from now on."""
        self._held[request_id] = (now + self.duration_s, blocks)

    def renew(self, request_id: str, now: float) -> None:
        """A heartbeat: the reader is alive and will come. Sets the end to two thirds of a lease from now."""
        held = self._held.get(request_id)
        if held is not None:
            self._held[request_id] = (max(held[0], now + self.duration_s * 2 / 3), held[1])

    def collect(self, request_id: str) -> list[int]:
        """The reader is done: the blocks to free, none if the lease is unknown or over."""
        held = self._held.pop(request_id, None)
        if held is None:
            self.late += 1
            return []
        return held[1]

    def reap(self, now: float) -> list[int]:
        """Blocks of all leases that have ended. Looks at every lease: a renewed one does not hide those behind it."""
        over = [request_id for request_id, (end, _) in self._held.items() if end <= now]
        freed: list[int] = []
        for request_id in over:
            freed.extend(self._held.pop(request_id)[1])
        self.expired += len(over)
        return freed

    def next_end(self) -> float | None:
        """When the next lease ends, None if there is none."""
        return min((end for end, _ in self._held.values()), default=None)
