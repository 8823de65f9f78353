"""Facts about a request: what the policies of this deployment want to know before an instance is chosen.

Only what a policy needs is found out, once per request. The rest of the router hands the `Hints` of a request on and
knows nothing of what is in them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import msgspec

from disagg.errors import ConfigError, Problem
from disagg.http.messages import Request
from disagg.policy.base import NOTHING, Facts, Need, Policy
from disagg.policy.conditional import local_reason
from disagg.policy.kv_index import KvIndex, Prompt
from disagg.policy.prefix_index import PrefixIndex, prefix_keys
from disagg.router.fleet import Fleet, Member
from disagg.router.intake import Intake
from disagg.router.prompt_text import prompt_seed, prompt_text
from disagg.router.series import Gauge, Labels, Series
from disagg.router.tokens import Tokens
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

_ON_REQUEST = frozenset({Need.SESSION, Need.SENT_PREFIX, Need.HELD_BLOCKS})


class Hints:
    """What is known about one request.

    Attributes:
        session: Its session; empty if it names none.
        keys: Keys of its prompt's blocks.
        text_bytes: Length of the prompt as it was sent, in bytes; 0 if nobody needs it.
        length: The same in tokens, counted or estimated.
        prompt: Its token ids, where a policy needs them and they could be had.
    """

    __slots__ = ("keys", "length", "prompt", "session", "text_bytes")

    def __init__(self) -> None:
        self.session = b""
        self.keys: list[bytes] = []
        self.text_bytes = 0
        self.length = 0.0
        self.prompt: Prompt | None = None


class Affinity:
    """Finds out the facts for the policies, and remembers for them what they may not remember themselves.

    Args:
        policies: How an instance of a stage is chosen.
        spec: Limits and names.
        fleet: Who is there.
        tokens: Finds out token ids, for policies that compare blocks.

    Attributes:
        kv_index: What engines said that they hold.
    """

    def __init__(self, policies: Mapping[Stage, Policy], spec: RouterSpec, fleet: Fleet, tokens: Tokens) -> None:
        self._stages = [s for s in policies if fleet.needs(s)]
        self.kv_index = KvIndex(spec.kv_index_blocks)
        self._policies = dict(policies)
        self._spec = spec
        self._tokens = tokens
        self._fleet = fleet
        self._threshold = spec.local_prefill_tokens
        self._session_header = spec.session_header.lower().encode("latin-1")
        self._prefixes: dict[Stage, PrefixIndex] = {}
        self._gather_needs()
        self._listened = self.needs(Need.HELD_BLOCKS)
        self._turns = dict.fromkeys(Stage, 0)
        # Draws only spread load: nothing secret depends on them.
        self._random = random.Random()  # noqa: S311
        fleet.on_gone(self._member_gone)

    def set_policy(self, stage: Stage, policy: Policy) -> None:
        """Choose the instances of a stage in another way from now on.

        Raises:
            ConfigError: If the policy compares blocks that engines say they hold, and nobody listens to them yet.
        """
        self.check(stage, policy)
        self._policies[stage] = policy
        self._gather_needs()

    def check(self, stage: Stage, policy: Policy) -> None:
        """Whether the instances of a stage could be chosen in another way.

        Raises:
            ConfigError: See `set_policy`.
        """
        if Need.HELD_BLOCKS in policy.needs and stage not in self._listened:
            raise needs_events(stage)

    def _gather_needs(self) -> None:
        stages = self._stages
        self._needed: frozenset[Need] = frozenset().union(*(self._policies[s].needs for s in stages))
        self._silent = self._needed.isdisjoint(_ON_REQUEST) and not self._threshold
        self._drawing = frozenset(s for s, p in self._policies.items() if Need.DRAW in p.needs)
        wanted = [s for s in stages if Need.SENT_PREFIX in self._policies[s].needs]
        self._prefixes = {s: self._prefixes.get(s) or PrefixIndex(self._spec.prefix_index_entries) for s in wanted}

    def needs(self, need: Need) -> tuple[Stage, ...]:
        """The stages of this deployment whose policy looks at a fact."""
        return tuple(s for s in self._stages if need in self._policies[s].needs)

    def with_session(self, request: Request, intake: Intake) -> Intake:
        """A request that knows its session, if a policy looks at sessions."""
        if Need.SESSION not in self._needed:
            return intake
        session = request.header(self._session_header) or bytes(intake.body.get("user", b""))
        return msgspec.structs.replace(intake, session=session)

    async def hints(self, intake: Intake) -> Hints | None:
        """Find out what the policies need to know about a request; None if that is nothing."""
        if self._silent:
            return None
        body, hints = intake.body, Hints()
        needed = self._needed
        hints.session = intake.session
        if self._threshold or self._compares_prefixes():
            text = prompt_text(body)
            hints.text_bytes = len(text)
            hints.length = self._tokens.count(text)
            if self._prefixes:
                hints.keys = prefix_keys(prompt_seed(body), text)
        if Need.HELD_BLOCKS in needed and len(self.kv_index):
            hints.prompt = await self._tokens.of(body, intake.headers)
        return hints

    def _compares_prefixes(self) -> bool:
        """Whether a stage whose policy goes by what was sent before has a choice at all. Where there is no other
        instance, nothing is remembered either: the first requests of a second one are spread by load."""
        return any(self._fleet.has_choice(stage) for stage in self._prefixes)

    def question(self, stage: Stage, hints: Hints | None) -> tuple[Policy, Facts]:
        """What is asked when an instance of a stage is chosen: the policy, and the facts of this request.

        Args:
            stage: Of which stage.
            hints: What is known about the request.
        """
        turn = self._turns[stage]
        self._turns[stage] = turn + 1
        policy = self._policies[stage]
        draw = self._random.random() if stage in self._drawing else 0.0
        if hints is None:
            return policy, Facts(turn, draw)
        length, matched = self._matched(stage, hints)
        return policy, Facts(turn, draw, hints.session, length, matched)

    def sent(self, stage: Stage, name: str, hints: Hints | None) -> None:
        """An instance was chosen, and will be sent the request.

        Noted before the request is there: the next one with this beginning may come sooner than the answer.
        """
        if hints is not None and hints.keys and stage in self._prefixes:
            self._prefixes[stage].record(hints.keys, name)

    def local_reason(self, hints: Hints | None, serving: Stage) -> str | None:
        """Why a request is better prefilled where it is decoded, or None.

        Args:
            hints: What is known about the request.
            serving: The stage that decodes.
        """
        if hints is None or not self._threshold:
            return None
        length, matched = self._matched(serving, hints)
        return local_reason(length, matched.values(), self._threshold)

    def learn(self, hints: Hints | None, prompt_tokens: int) -> None:
        """An engine counted the tokens of a request's prompt."""
        if hints is not None:
            self._tokens.learn(hints.text_bytes, prompt_tokens)

    def _matched(self, stage: Stage, hints: Hints) -> tuple[float, Mapping[str, float]]:
        """Length of the prompt in tokens, and how many of them instances of a stage are thought to hold."""
        if hints.prompt is not None and Need.HELD_BLOCKS in self._policies[stage].needs:
            return len(hints.prompt.tokens), self.kv_index.matched(hints.prompt)
        if stage not in self._prefixes or not hints.text_bytes:
            return hints.length, NOTHING
        tokens_per_byte = hints.length / hints.text_bytes
        sent = self._prefixes[stage].matched(hints.keys)
        return hints.length, {name: size * tokens_per_byte for name, size in sent.items()}

    def _member_gone(self, member: Member) -> None:
        if member.stage in self._prefixes:
            self._prefixes[member.stage].forget(member.name)

    def series(self) -> tuple[Series, ...]:
        """What there is to see of it."""
        if not self._prefixes:
            return ()

        def entries() -> Iterator[tuple[Labels, float]]:
            return (((stage,), len(index)) for stage, index in self._prefixes.items())

        return (Gauge("disagg_prefix_index_entries", "Prompt blocks that affinity remembers.", ("stage",), entries),)


def needs_events(stage: Stage) -> ConfigError:
    """The error for a policy that compares blocks which nobody has listened for."""
    told = "needs the engines' KV events, which are listened to from the start on; restart with it"
    return ConfigError([Problem(f"router.{stage}_policy", told)])
