"""Identifier ranges such as ``0..15`` and port numbers, parsed from what users type, and text made safe to show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_PORT = 65535
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")
# A group larger than this is a typing error (0..150000), and must not fill the memory before it is refused.
_MAX_IDS = 4096


def parse_id_group(text: str) -> tuple[int, ...]:
    """Read one device group.

    Args:
        text: Inclusive ranges and single ids separated by commas: ``0..15``, ``0,2,4``, ``0..3,8``.

    Returns:
        The ids in the order written.

    Raises:
        ValueError: If a part is empty or not a number, a range is reversed, or an id is repeated.
    """
    ids: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is not an id or a range; write ids like 0,2,4 or ranges like 0..15")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise ValueError(f"range {part.strip()} is reversed; write {last}..{first}")
        if last - first >= _MAX_IDS:
            raise ValueError(f"range {part.strip()} has more than {_MAX_IDS} ids")
        ids.extend(range(first, last + 1))
    repeated = sorted({i for i in ids if ids.count(i) > 1}) if len(set(ids)) != len(ids) else []
    if repeated:
        raise ValueError(f"id {', '.join(map(str, repeated))} is repeated")
    return tuple(ids)


def format_id_group(ids: Sequence[int]) -> str:
    """Write ids as the shortest group: ``(0, 1, 2, 5)`` becomes ``0..2,5``."""
    parts: list[str] = []
    start = 0
    while start < len(ids):
        end = start
        while end + 1 < len(ids) and ids[end + 1] == ids[end] + 1:
            end += 1
        if end - start >= 2:
            parts.append(f"{ids[start]}..{ids[end]}")
        else:
            parts.extend(str(i) for i in ids[start : end + 1])
        start = end + 1
    return ",".join(parts)


def parse_ports(text: str) -> tuple[int, ...]:
    """Read a comma list of TCP ports.

    Raises:
        ValueError: If a port is not a number from 1 to 65535.
    """
    ports: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if not word.isdecimal() or not 1 <= int(word) <= MAX_PORT:
            raise ValueError(f"{word!r} is not a port; ports are whole numbers from 1 to {MAX_PORT}")
        ports.append(int(word))
    return tuple(ports)


def comma_list(items: Iterable[object]) -> str:
    """Join for a message: ``a, b, c``."""
    return ", ".join(str(i) for i in items)


def printable(text: str) -> str:
    """Text for a terminal: control characters as escapes, except line ends and tabs.

    What comes from files and servers could otherwise move the cursor, change colours or set the window's title.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
