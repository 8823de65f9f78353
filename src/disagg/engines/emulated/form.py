"""How an API writes answers: what an exchange needs of each, whatever the API."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from disagg.engines.emulated.sequence import Sequence
from disagg.errors import DisaggError
from disagg.http.messages import Answer


@dataclass(frozen=True, slots=True)
class Identity:
    """What every answer of a request repeats.

    Attributes:
        id: The answer's id.
        internal: The engine's own id of the request, before the suffix that makes it unique.
        created: Seconds since 1970.
        model: Name of the model as served.
        fingerprint: `system_fingerprint`.
        details: Whether usage tells cached tokens.
        numbered: The number of the prompt is part of the internal id.
    """

    id: str
    internal: str
    created: int
    model: str
    fingerprint: str
    details: bool
    numbered: bool = False


class Form(Protocol):
    """Writes the answer to one request in its API's shape."""

    def full(self, sequences: Items[Sequence]) -> bytes:
        """A whole answer that is not streamed."""
        ...

    def opening(self, sequences: Items[Sequence]) -> bytes:
        """Events that come before the first token."""
        ...

    def delta(self, index: int, seq: Sequence) -> bytes:
        """The next events of one choice: everything since the last ones, and the end if it has ended."""
        ...

    def closing(self, sequences: Items[Sequence]) -> bytes:
        """What ends a stream."""
        ...

    def failed(self, error: DisaggError) -> bytes:
        """An error inside a stream, and the end of the stream."""
        ...

    def refused(self, error: DisaggError) -> Answer:
        """An error instead of an answer."""
        ...
