"""Ids that nobody can guess, a call of the kernel for many of them."""

from __future__ import annotations

import os

_AT_ONCE = 64
_BYTES = 16


class RandomIds:
    """Hands out ids of 32 hex digits, each from 16 random bytes of its own that are used for nothing else.

    One that is known tells nothing about the next. For one process: a fork would hand out the same ones again.
    """

    __slots__ = ("_drawn",)

    def __init__(self) -> None:
        self._drawn: list[str] = []

    def take(self) -> str:
        """A fresh id."""
        if not self._drawn:
            self._draw()
        return self._drawn.pop()

    def _draw(self) -> None:
        digits = os.urandom(_AT_ONCE * _BYTES).hex()
        width = 2 * _BYTES
        self._drawn = [digits[at : at + width] for at in range(0, len(digits), width)]
