"""KV that was sent ahead, found by the prompt's tokens: the buffer of a decode engine with LMCache."""

from __future__ import annotations

from collections import OrderedDict


class Received:
    """Blocks by prefix key; the oldest give way.

    Args:
        capacity: Blocks that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._content: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._content)

    def store(self, key: int, content: bytes) -> None:
        """Keep one block."""
        self._content[key] = content
        self._content.move_to_end(key)
        while len(self._content) > self._capacity:
            self._content.popitem(last=False)

    def find(self, keys: list[int]) -> list[bytes]:
        """Content of the longest run of these blocks from the first on."""
        found = []
        for key in keys:
            content = self._content.get(key)
            if content is None:
                break
            found.append(content)
        return found
