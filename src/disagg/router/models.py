"""`/v1/models`: the names that are served here, described as an engine describes its own."""

from __future__ import annotations

import msgspec

from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Answer, Header, json_answer
from disagg.http.origin import Outgoing
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet, Member
from disagg.topology.spec import Stage

_TIMES = LegTimes(5.0, 5.0, 5.0)
_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.COLOCATED)


class _Cards(msgspec.Struct):
    data: list[dict[str, object]]


_cards = msgspec.json.Decoder(_Cards)


class Models:
    """Answers `/v1/models` from what the engines said once per incarnation, so it also works while they are busy."""

    def __init__(self, config: RouterConfig, fleet: Fleet, client: Client, clocks: Clocks) -> None:
        self._config = config
        self._fleet = fleet
        self._client = client
        self._created = int(clocks.wall())
        self._known: dict[Stage, tuple[str, dict[str, object]]] = {}

    async def answer(self, headers: tuple[Header, ...]) -> Answer:
        """The list of models; `headers` go to an engine that has to be asked."""
        cards = [card for stage in _STAGES if (card := await self._card(stage, headers)) is not None]
        card = {"object": "model", "owned_by": "disagg", "root": None, "parent": None, **(cards[-1] if cards else {})}
        # The smaller limit counts: a prompt has to fit on every stage that it passes.
        limits = [v for c in cards if isinstance(v := c.get("max_model_len"), int)]
        card["max_model_len"] = self._config.max_model_len or (min(limits) if limits else None)
        card["created"] = self._created
        names = self._config.served_model_names
        return json_answer(200, {"object": "list", "data": [{"id": name, **_without_id(card)} for name in names]})

    async def _card(self, stage: Stage, headers: tuple[Header, ...]) -> dict[str, object] | None:
        known = self._known.get(stage)
        member = next((m for m in self._fleet.members(stage) if m.ready), None)
        if member is None or (known is not None and known[0] == member.incarnation):
            return known[1] if known is not None else None
        card = await self._ask(member, headers)
        if card is not None:
            self._known[stage] = (member.incarnation, card)
        return card

    async def _ask(self, member: Member, headers: tuple[Header, ...]) -> dict[str, object] | None:
        try:
            response = await self._client.request(member.origin, Outgoing("GET", "/v1/models", headers), _TIMES)
            body = await response.read()
            cards = _cards.decode(body).data if response.status == 200 else []
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            # The list of names is right without it; the engine's own troubles show on /health.
            return None
        return cards[0] if cards else None


def _without_id(card: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in card.items() if key != "id"}
