"""Token ids of a prompt: the client's own, or what an engine makes of its text.

Only exact KV affinity asks engines, once per text: the answer is kept for the next request with the same text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection
from hashlib import blake2b

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Body
from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Header
from disagg.http.origin import Outgoing
from disagg.policy.kv_index import Prompt
from disagg.router.fleet import Fleet
from disagg.router.kv_batches import encode_extra
from disagg.router.prompt_text import prompt_ids
from disagg.router.series import Counter, Series

BYTES_PER_TOKEN = 4.0
"""Of prompts as they are sent, until engines have counted some."""
_KEPT_TOKENS = 2_000_000
_TIMES = LegTimes(1.0, 1.0, 1.0)
_PAUSE_S = 5.0
_LEARN = 0.05
_ASKED = (
    "model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip
_text = msgspec.json.Decoder(str)


class _Answer(msgspec.Struct):
    tokens: list[int]


_answer = msgspec.json.Decoder(_Answer)


class Tokens:
    """Counts, estimates and finds out tokens.

    Args:
        fleet: Whose engines are asked.
        client: Connections to them.
        base_names: Names of the model itself, as opposed to its adapters.
        now: Monotonic seconds.

    Attributes:
        per_byte: Tokens per byte of a prompt, as engines have counted lately.
    """

    def __init__(self, fleet: Fleet, client: Client, base_names: Collection[str], now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._client = client
        self._base_names = frozenset(base_names)
        self._now = now
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._kept = 0
        self._silent_until = 0.0
        self.per_byte = 1.0 / BYTES_PER_TOKEN
        self._failures = Counter(
            "disagg_tokenize_failures", "Prompts whose token ids no engine told: the policy goes by load alone."
        )

    def learn(self, text_bytes: int, tokens: int) -> None:
        """An engine counted `tokens` in a prompt of `text_bytes` bytes. Short prompts say little, and are ignored."""
        if text_bytes >= 256 and tokens > 0:
            self.per_byte += _LEARN * (min(tokens / text_bytes, 1.0) - self.per_byte)

    def count(self, text: bytes) -> float:
        """Tokens of a prompt as it was sent: counted if it is a list of ids, else estimated."""
        if text[:1] == b"[" and text[:16].lstrip(b"[ \t\r\n")[:1].isdigit():
            return text.count(b",") + 1
        return len(text) * self.per_byte

    async def of(self, body: Body, headers: tuple[Header, ...]) -> Prompt | None:
        """The prompt's token ids, or None if they cannot be had.

        Args:
            body: The client's.
            headers: The client's headers that engines get.
        """
        ids = prompt_ids(body) or await self._tokenized(body, headers)
        return None if ids is None else Prompt(ids, *self._extra(body))

    def series(self) -> tuple[Series, ...]:
        """What there is to see of it."""
        return (self._failures,)

    def _extra(self, body: Body) -> tuple[bytes, bytes]:
        """What an engine hashes into the first block, and into all others, besides tokens."""
        model, salt = _string(body, "model"), _string(body, "cache_salt")
        adapter = [model] if model and model not in self._base_names else []
        return encode_extra([*adapter, salt] if salt else adapter), encode_extra(adapter)

    async def _tokenized(self, body: Body, headers: tuple[Header, ...]) -> array[int] | None:
        text = body.get("prompt", body.get("messages"))
        if text is None or "system" in body or bytes(text).lstrip()[:1] not in {b'"', b"["}:
            return None
        question = bodies.encode({key: body[key] for key in _ASKED if key in body})
        key = blake2b(question, digest_size=16).digest()
        known = self._known.get(key)
        if known is None:
            known = await self._ask(question, headers)
            if known is None:
                return None
            self._known[key] = known
            self._kept += len(known)
            while self._kept > _KEPT_TOKENS:
                self._kept -= len(self._known.popitem(last=False)[1])
        else:
            self._known.move_to_end(key)
        return known

    async def _ask(self, question: bytes, headers: tuple[Header, ...]) -> array[int] | None:
        ready = [m for m in self._fleet.members() if m.ready]
        if not ready or self._now() < self._silent_until:
            return None
        member = min(ready, key=lambda m: m.in_flight)
        try:
            outgoing = Outgoing("POST", "/tokenize", (JSON_TYPE, *headers), question)
            response = await self._client.request(member.origin, outgoing, _TIMES)
            answer = await response.read()
            if response.status in {400, 401, 403, 422}:
                return None  # so will be the request itself: its own answer says why
            if response.status == 200:
                return array("I", _answer.decode(answer).tokens)
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError, OverflowError):
            # Counted below, and on /metrics. The request itself may still be served.
            pass
        self._failures.values[()] += 1
        # A busy engine must not cost every request a second.
        self._silent_until = self._now() + _PAUSE_S
        return None


def _string(body: Body, key: str) -> str:
    raw = body.get(key)
    if raw is None:
        return ""
    try:
        return _text.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
