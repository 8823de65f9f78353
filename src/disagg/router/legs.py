"""One leg: an HTTP call of a request to one instance, with its books, its limits, and what its failure means."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

from disagg.errors import DisaggError, UpstreamError, UpstreamTimeoutError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Answer
from disagg.http.origin import Outgoing
from disagg.http.response import Response
from disagg.policy.base import Facts, Policy, choose
from disagg.router.fleet import Fleet, Member
from disagg.router.metrics import Metrics
from disagg.router.relay import hide_internal, relayed_headers
from disagg.topology.spec import Stage

# 500 is what an engine that has died answers; vLLM gives the same 500 when KV could not be fetched.
_RETRIED = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Failure:
    """A leg that did not bring what it was for.

    Attributes:
        stage: Where it happened.
        instance: On which instance.
        outcome: A word for metrics.
        retry: Another try may succeed.
        refused: The instance took nothing: it could not be connected to, or cannot hand off. It is not asked again.
        crashed: The instance had the request when its connection broke, or answered 500. What kills one engine may
            kill the next.
        error: What the client is told if no engine's answer says it.
        answer: The engine's own answer.
    """

    stage: Stage
    instance: str
    outcome: str
    retry: bool
    refused: bool = False
    crashed: bool = False
    error: DisaggError | None = None
    answer: Answer | None = None


class Leg:
    """An open call. Closing it, once or more often, closes the connection if the answer is not complete."""

    __slots__ = ("_closed", "_metrics", "_now", "_started_at", "member", "outcome", "response", "sent")

    def __init__(self, member: Member, metrics: Metrics, now: Callable[[], float]) -> None:
        self.member = member
        self.response: Response | None = None
        self.outcome = "cancelled"
        self.sent = False
        self._metrics = metrics
        self._now = now
        self._started_at = now()
        self._closed = False
        member.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the books of this leg."""
        if self._closed:
            return
        self._closed = True
        if self.response is not None:
            self.response.close()
        self.member.count(-1)
        self._metrics.leg_ended(self.member.stage, self.member.name, self.outcome, self._now() - self._started_at)

    def fail(self, error: UpstreamError) -> Failure:
        """What an error of the connection means."""
        member = self.member
        told = type(error)(f"{member.stage.capitalize()} instance {member.name} failed: {error.message}")
        if isinstance(error, UpstreamTimeoutError):
            self.outcome = "timeout"
            return Failure(member.stage, member.name, "timeout", retry=False, error=told)
        self.outcome = "broken" if self.sent else "unreachable"
        return Failure(
            member.stage, member.name, self.outcome, retry=True, refused=not self.sent, crashed=self.sent, error=told
        )

    def refuse(self, response: Response, body: bytes) -> Failure:
        """What an engine's answer other than 200 means. Its status, type and message are kept."""
        status = response.status
        self.outcome = "refused" if status < 500 else "failed"
        answer = Answer(status, hide_internal(body), tuple(relayed_headers(response.headers)))
        return Failure(
            self.member.stage,
            self.member.name,
            self.outcome,
            retry=status in _RETRIED,
            crashed=status == 500,
            answer=answer,
        )


class Legs:
    """Chooses instances and opens legs to them.

    Args:
        fleet: Who is there.
        client: Connections to them.
        policies: How an instance of a stage is chosen.
        metrics: Where legs are counted.
        now: Monotonic seconds.
    """

    def __init__(
        self, fleet: Fleet, client: Client, policies: dict[Stage, Policy], metrics: Metrics, now: Callable[[], float]
    ) -> None:
        self.fleet = fleet
        self.client = client
        self.metrics = metrics
        self.now = now
        self._policies = policies
        self._turns = dict.fromkeys(Stage, 0)

    def pick(self, stage: Stage, avoided: Collection[str], excluded: Collection[str]) -> Member | None:
        """Choose an instance.

        Args:
            stage: Of which stage.
            avoided: Names that are taken only if there is no other.
            excluded: Names that are not taken.
        """
        turn = self._turns[stage]
        self._turns[stage] = turn + 1
        snapshots = self.fleet.snapshots(stage)
        facts = Facts(turn)
        policy = self._policies[stage]
        chosen = choose(policy, snapshots, facts, {*avoided, *excluded}) if avoided or excluded else None
        if chosen is None:
            chosen = choose(policy, snapshots, facts, excluded)
        return self.fleet.get(chosen.name) if chosen is not None else None

    def can_pick(self, stage: Stage, excluded: Collection[str]) -> bool:
        """Whether `pick` would find an instance."""
        return any(m.ready and m.name not in excluded for m in self.fleet.members(stage))

    def open(self, member: Member) -> Leg:
        """Begin a leg; the caller closes it."""
        return Leg(member, self.metrics, self.now)

    async def send(
        self, leg: Leg, outgoing: Outgoing, times: LegTimes, check: Callable[[], None] | None = None
    ) -> Response:
        """Send a leg's request; returns when its answer has begun.

        Args:
            leg: Opened before.
            outgoing: The request.
            times: Its limits.
            check: Called right before the request leaves; what it raises keeps it here.

        Raises:
            UpstreamError: See `disagg.http.client.Client.request`.
        """

        def before_send() -> None:
            if check is not None:
                check()
            leg.sent = True

        leg.response = await self.client.request(leg.member.origin, outgoing, times, before_send)
        return leg.response
