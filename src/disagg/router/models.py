"""`/v1/models`: the names that are served here, described as an engine describes its own, and adapters on all stages.

An engine is asked once per incarnation. So the list also works while engines are busy or gone, and a model name is
checked without asking anybody. A LoRA adapter can be used where every stage that the request passes has it: prefill
without it would hand over the KV of another model.
"""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import msgspec

from disagg.errors import UnknownModelError, UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Answer, Header, json_answer
from disagg.http.origin import Outgoing
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet, Member
from disagg.topology.spec import Stage

PATH = "/v1/models"
_TIMES = LegTimes(5.0, 5.0, 5.0)
_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.COLOCATED)
# How often a name that nobody knows makes us ask again: an adapter may have been loaded since.
_ASK_AGAIN_S = 2.0

Card = dict[str, object]


class _Cards(msgspec.Struct):
    data: list[Card]


_cards = msgspec.json.Decoder(_Cards)


class Models:
    """What is served here.

    Args:
        config: The served names, and the context limit if it is known.
        fleet: Who is asked.
        client: How.
        clocks: Time.

    Attributes:
        names: Names that requests may carry.
        limit: The most tokens that a prompt and its answer may have on every stage; None while it is not known.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, client: Client, clocks: Clocks) -> None:
        self._config = config
        self._fleet = fleet
        self._client = client
        self._now = clocks.monotonic
        self._created = int(clocks.wall())
        self._known: dict[str, tuple[str, Stage, list[Card]]] = {}
        self._asked_at = float("-inf")
        self.names = frozenset(config.served_model_names)
        self.limit = config.max_model_len

    async def answer(self, headers: tuple[Header, ...]) -> Answer:
        """The list of models; `headers` go to the engines that have to be asked."""
        return json_answer(200, {"object": "list", "data": await self._list(headers)})

    async def one(self, path: str, headers: tuple[Header, ...]) -> Answer:
        """One model, by the rest of a path.

        Raises:
            UnknownModelError: If it is not served here.
        """
        name = unquote(path.removeprefix(PATH + "/"))
        for card in await self._list(headers):
            if card["id"] == name:
                return json_answer(200, card)
        raise UnknownModelError(f"The model `{name}` does not exist.", param="model")

    async def look_again(self, headers: tuple[Header, ...]) -> bool:
        """Ask the engines for adapters that they did not have before; not more often than every two seconds.

        Returns:
            Whether further names are served now.
        """
        if self._now() - self._asked_at < _ASK_AGAIN_S:
            return False
        self._asked_at = self._now()
        before = self.names
        await self._learn(headers, again=True)
        return not self.names <= before

    async def _list(self, headers: tuple[Header, ...]) -> list[Card]:
        await self._learn(headers, again=False)
        own = [card for _, _, cards in self._known.values() for card in cards[:1]]
        card = {"object": "model", "owned_by": "disagg", "root": None, "parent": None, **(own[-1] if own else {})}
        card |= {"max_model_len": self.limit, "created": self._created}
        names = self._config.served_model_names
        listed = [{"id": name, **_without_id(card)} for name in names]
        adapters = self._adapters()
        for name in sorted(adapters):
            told = {**adapters[name], "max_model_len": self.limit, "created": self._created}
            listed.append({"id": name, **_without_id(told)})
        return listed

    async def _learn(self, headers: tuple[Header, ...], *, again: bool) -> None:
        """Ask the engines that have not been asked since they started, or all of them."""
        members = [m for stage in _STAGES for m in self._fleet.members(stage) if m.ready]
        unknown = [m for m in members if again or self._known.get(m.name, ("",))[0] != m.incarnation]
        if not unknown:
            return
        # In the fleet's order, whoever answers first.
        answers = await asyncio.gather(*(self._ask(member, headers) for member in unknown))
        for member, cards in zip(unknown, answers, strict=True):
            if cards:
                self._known[member.name] = (member.incarnation, member.stage, cards)
        for name in [n for n in self._known if self._fleet.get(n) is None]:
            del self._known[name]
        self.names = frozenset((*self._config.served_model_names, *self._adapters()))
        limits = [
            v for _, _, cards in self._known.values() for c in cards if isinstance(v := c.get("max_model_len"), int)
        ]
        # The smaller limit counts: a prompt has to fit on every stage that it passes.
        self.limit = self._config.max_model_len or (min(limits) if limits else None)

    def _adapters(self) -> dict[str, Card]:
        """Adapters that every stage has, on each of its instances."""
        needed = [s for s in _STAGES if self._fleet.needs(s)]
        if {stage for _, stage, _ in self._known.values()} < set(needed):
            return {}
        found: dict[str, Card] | None = None
        for _, _, cards in self._known.values():
            own = {str(c["id"]): c for c in cards if c.get("parent") is not None and "id" in c}
            found = own if found is None else {name: card for name, card in found.items() if name in own}
        return found or {}

    async def _ask(self, member: Member, headers: tuple[Header, ...]) -> list[Card]:
        try:
            response = await self._client.request(member.origin, Outgoing("GET", PATH, headers), _TIMES)
            body = await response.read()
            return _cards.decode(body).data if response.status == 200 else []
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            # The list of names is right without it; the engine's own troubles show on /health.
            return []


def _without_id(card: Card) -> Card:
    return {key: value for key, value in card.items() if key != "id"}
