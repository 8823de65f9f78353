"""A number that knows where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """What stands behind a number, from the firmest to the loosest."""

    MEASURED = "measured"
    """Timed on the machine in question."""
    CATALOGUE = "catalogue"
    """Published: a data sheet, a model's configuration, somebody's measurement. The source says which."""
    USER = "user"
    """Given by the user."""
    DEFAULT = "default"
    """A named default of ours; the source says what it rests on."""
    DERIVED = "derived"
    """Computed from other figures."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number.

    Attributes:
        value: In SI units: bytes, seconds, bytes/s, FLOP/s, or a plain ratio.
        origin: How firm it is.
        source: Where it is written: a document, a file, a flag. One line.
    """

    value: float
    origin: Origin
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.origin}: {self.source})"
