"""Which instance was sent which prompts: what an instance is likely to have in its cache, without asking it."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

BOUNDARIES = (256, 512, *range(1024, 256 * 1024 + 1, 1024))
"""Bytes of a prompt at which a block ends.

What is left after the last whole block is not looked at, so a prompt below 256 bytes has no affinity; neither is what
comes after the first 256 KiB."""
_KEY_BYTES = 8


def prefix_keys(seed: bytes, text: bytes) -> list[bytes]:
    """One key per block of a prompt.

    Each covers everything from the beginning: two prompts have a key in common only if they are equal up to there.

    Args:
        seed: What else decides about the KV of the same text, such as the model's name.
        text: The prompt, as bytes whose beginning is the beginning of the prompt.
    """
    # Of the library's stable hashes the fastest: processors have instructions for it.
    state = sha256(b"%d:%b" % (len(seed), seed))
    update, digest = state.update, state.digest
    keys = []
    begin = 0
    for end in BOUNDARIES[: bisect_right(BOUNDARIES, len(text))]:
        update(text[begin:end])
        keys.append(digest()[:_KEY_BYTES])
        begin = end
    return keys


class PrefixIndex:
    """A bounded memory of which instance was sent which blocks; the least recently sent ones are forgotten first.

    Args:
        max_entries: Most pairs of block and instance.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        # Key to numbers of those who were sent it. A number is never used again: the pairs of an instance that was
        # forgotten mean nothing from then on, and leave when their block is touched or its time has come.
        self._holders: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def record(self, keys: Sequence[bytes], name: str) -> None:
        """An instance was sent a prompt with these keys."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next
            self._names[number] = name
            self._next += 1
        holders = self._holders
        # Backwards, so that the end of a prompt is forgotten before its beginning, as engines do.
        for key in reversed(keys):
            found = holders.get(key)
            if found is None:
                holders[key] = (number,)
                self._entries += 1
                continue
            holders.move_to_end(key)
            if number not in found:
                kept = (*[n for n in found if n in self._names], number)
                holders[key] = kept
                self._entries += len(kept) - len(found)
        while self._entries > self._max_entries:
            self._entries -= len(holders.popitem(last=False)[1])

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Bytes from the prompt's beginning that an instance was sent before, by name of those who were sent any."""
        result: dict[str, int] = {}
        names = self._names
        for index in range(len(keys) - 1, -1, -1):
            for number in self._holders.get(keys[index], ()):
                name = names.get(number)
                if name is not None and name not in result:
                    result[name] = BOUNDARIES[index]
            if len(result) == len(names):
                break
        return result

    def forget(self, name: str) -> None:
        """An instance is gone, or has been started anew, and holds nothing."""
        number = self._numbers.pop(name, None)
        if number is not None:
            del self._names[number]
