"""What the pages of one router among several show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Whole(Protocol):
    """What all routers on the port show together."""

    async def page(self) -> bytes:
        """Their metrics page."""
        ...

    async def in_flight(self) -> Mapping[str, int]:
        """Open legs by instance."""
        ...
