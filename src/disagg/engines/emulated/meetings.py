"""Where the two legs of a request meet that left together: prefill offers KV under a key, decode asks for it.

Whoever comes first waits. An offer that nobody asks for ends with its time, as a lease does.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_MAX_FORGOTTEN = 10_000


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of a prompt.

    Attributes:
        blocks: Where it is, in prompt order.
        cached_tokens: Prompt tokens that prefill found in its cache.
        first_token: What prefill sampled.
        ends: When it is given up.
    """

    blocks: list[int]
    cached_tokens: int
    first_token: int
    ends: float


Taker = Callable[[Offer], None]


@dataclass(slots=True)
class Meetings:
    """Offers and questions of one prefill engine.

    Attributes:
        by_request: Keys are request ids, which match without the suffix that each engine adds.
        expired: Offers that nobody asked for in time.
        on_ask: Told the key of each question that finds no offer.
    """

    by_request: bool = False
    expired: int = 0
    on_ask: Callable[[str], None] | None = None
    _offers: dict[str, Offer] = field(default_factory=dict)
    _asked: dict[str, Taker] = field(default_factory=dict)
    _forgotten: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._offers)

    def _find(self, key: str, held: dict[str, Offer] | dict[str, Taker]) -> str | None:
        """The key under which a partner is there: the same, or else the same without suffixes."""
        if key in held:
            return key
        if not self.by_request:
            return None
        bare = _SUFFIX.sub("", key)
        return next((other for other in held if _SUFFIX.sub("", other) == bare), None)

    def asked(self, key: str) -> bool:
        """Whether somebody waits for this."""
        return self._find(key, self._asked) is not None

    def offer(self, key: str, offer: Offer) -> bool:
        """Hand KV over if it was asked for, else keep it. Whether its blocks are free again."""
        bare = _SUFFIX.sub("", key) if self.by_request else key
        if bare in self._forgotten:
            del self._forgotten[bare]
            return True
        waiting = self._find(key, self._asked)
        if waiting is not None:
            self._asked.pop(waiting)(offer)
            return True
        self._offers[key] = offer
        return False

    def ask(self, key: str, take: Taker) -> list[int]:
        """Take KV, now or when it is there. Returns blocks that are free again."""
        found = self._find(key, self._offers)
        if found is not None:
            offer = self._offers.pop(found)
            take(offer)
            return offer.blocks
        self._asked[key] = take
        if self.on_ask is not None:
            self.on_ask(key)
        return []

    def withdraw(self, key: str) -> None:
        """Whoever asked has gone, and will not come back; what is offered later may be kept for somebody else."""
        self._asked.pop(key, None)

    def forget(self, key: str) -> list[int]:
        """Nobody will ask for this, whether it is offered already or not. Returns blocks that are free again."""
        self._asked.pop(key, None)
        found = self._find(key, self._offers)
        if found is not None:
            return self._offers.pop(found).blocks
        self._forgotten[_SUFFIX.sub("", key) if self.by_request else key] = None
        while len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        return []

    def reap(self, now: float) -> list[int]:
        """Blocks of offers whose time has ended."""
        over = [key for key, offer in self._offers.items() if offer.ends <= now]
        self.expired += len(over)
        return [block for key in over for block in self._offers.pop(key).blocks]
