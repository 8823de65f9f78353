"""One leg: an HTTP call of a request to one instance, with its books, its limits, and what its failure means."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Self

from disagg.errors import DisaggError, UpstreamError, UpstreamTimeoutError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Answer
from disagg.http.origin import Outgoing
from disagg.http.response import Response
from disagg.policy.base import choose
from disagg.router.affinity import Affinity, Hints
from disagg.router.breaker import Breakers
from disagg.router.budget import RetryBudget
from disagg.router.fleet import Fleet, Member
from disagg.router.metrics import Metrics
from disagg.router.relay import hide_internal, relayed_headers
from disagg.router.spans import LegSpan, Tracer
from disagg.topology.spec import Stage

# 500 is what an engine that has died answers; vLLM gives the same 500 when KV could not be fetched.
_RETRIED = frozenset({500, 502, 503, 504})
# Outcomes that count against an instance, and those of them that the other end of a handover may have caused.
_BAD = frozenset({"failed", "timeout", "broken", "unreachable", "no-handle", "foreign-engine"})
_SHARED = frozenset({"failed", "timeout"})


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


class Books(NamedTuple):
    """Where legs are written down.

    Attributes:
        metrics: What is counted.
        breakers: Who is left out for its failures.
        budget: How often failed requests may be tried again.
        now: Monotonic seconds.
        tracer: Makes a span for each, if traces are wanted.
    """

    metrics: Metrics
    breakers: Breakers
    budget: RetryBudget
    now: Callable[[], float]
    tracer: Tracer | None = None


class Source(NamedTuple):
    """Where the KV of a prompt is.

    Attributes:
        member: The prefill incarnation that holds it.
        since: When it answered, or was asked, monotonic seconds.
        answered: It has; False where the legs leave together.
    """

    member: Member
    since: float
    answered: bool


class Leg:
    """An open call. Closing it, once or more often, closes the connection if the answer is not complete.

    Attributes:
        member: Where it goes.
        response: The answer, once it has begun.
        outcome: How it ended.
        sent: The request has left.
        span: Its span, where traces are made.
        works: The client has been passed something of the answer.
        primes: It only fetches KV for another leg.
    """

    __slots__ = (
        "_books",
        "_closed",
        "_ends_at",
        "_source",
        "_started_at",
        "_trial",
        "member",
        "outcome",
        "primes",
        "response",
        "sent",
        "span",
        "works",
    )

    def __init__(self, books: Books, member: Member, source: Source | None) -> None:
        self.member = member
        self.response: Response | None = None
        self.outcome = "cancelled"
        self.sent = False
        self.works = False
        self.primes = False
        self.span: LegSpan | None = None
        self._books = books
        self._source = source
        self._started_at = now = books.now()
        self._ends_at = inf
        self._closed = False
        self._trial = books.breakers.began(member, now)
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
        books, member = self._books, self.member
        member.count(-1)
        now = books.now()
        books.metrics.leg_ended(member.stage, member.name, self.outcome, now - self._started_at)
        if self.primes:
            books.metrics.priming_ended(member.name, self.outcome)
        self._judge(now)
        if self.span is not None:
            self.span.end(self.outcome, self.response.status if self.response is not None else 0)

    @property
    def seconds(self) -> float:
        """How long it has lasted so far."""
        return self._books.now() - self._started_at

    def answered(self) -> None:
        """The answer has begun."""
        member = self.member
        self._books.metrics.leg_answered(member.stage, member.name, self.seconds)

    def limit(self, total_s: float) -> None:
        """It is sent, and may last so many seconds."""
        self._ends_at = self._books.now() + total_s

    def served(self, streaming_since: float | None = None) -> None:
        """Its answer is good so far: the instance works, and so does the one whose KV it used.

        Args:
            streaming_since: When its first token came, monotonic seconds; None if that is not known, as of a whole
                answer.
        """
        self.works = True
        books, source = self._books, self._source
        books.breakers.succeeded(self.member, self._started_at)
        if source is not None:
            books.breakers.succeeded(source.member, source.since)
            books.metrics.handed_over(source.member.name)
            if streaming_since is not None and source.answered:
                books.metrics.handoff_took(self.member.name, streaming_since - source.since)

    def _judge(self, now: float) -> None:
        """Tell the breakers what this leg shows."""
        breakers, member = self._books.breakers, self.member
        feeds_decode = member.stage is Stage.PREFILL
        if self.outcome == "ok":
            # What prefill has made is proved when decode has used it.
            if not (self.works or feeds_decode):
                self.served()
        elif self.outcome in _BAD and not (self.works and now >= self._ends_at):
            # The exception: a stream that lasted as long as a request may is nobody's fault.
            shared = self._source if self.outcome in _SHARED and not self.works else None
            breakers.failed(member, self._started_at, now, shared.member if shared is not None else None)
            if shared is not None:
                self._books.metrics.handoff_failed(f"decode-{self.outcome}")
        if self._trial:
            breakers.trial_over(member, now, verdict_follows=feeds_decode and self.outcome == "ok")

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
        self.outcome = "failed" if status in _RETRIED else "refused"
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
        affinity: What is known about requests, and how an instance of a stage is chosen.
        books: Where they are written down.
    """

    def __init__(self, fleet: Fleet, client: Client, affinity: Affinity, books: Books) -> None:
        self.fleet = fleet
        self.client = client
        self.affinity = affinity
        self.metrics = books.metrics
        self.now = books.now
        self._books = books

    def pick(
        self, stage: Stage, avoided: Collection[str], excluded: Collection[str], hints: Hints | None = None
    ) -> Member | None:
        """Choose an instance.

        Args:
            stage: Of which stage.
            avoided: Names that are taken only if there is no other.
            excluded: Names that are not taken.
            hints: What is known about the request.
        """
        breakers = self._books.breakers
        if breakers.any_tripped:
            breakers.look(self.now())
        snapshots = self.fleet.snapshots(stage)
        policy, facts = self.affinity.question(stage, hints)
        chosen = choose(policy, snapshots, facts, {*avoided, *excluded}) if avoided or excluded else None
        if chosen is None:
            chosen = choose(policy, snapshots, facts, excluded)
        if chosen is None and breakers.any_tripped:
            chosen = choose(policy, breakers.all_ready(stage), facts, excluded)
            if chosen is not None:
                self.metrics.breaker_overridden(stage)
        if chosen is None:
            return None
        self.affinity.sent(stage, chosen.name, hints)
        return self.fleet.get(chosen.name)

    def can_pick(self, stage: Stage, excluded: Collection[str]) -> bool:
        """Whether `pick` would find an instance."""
        return any(m.ready and m.name not in excluded for m in self.fleet.members(stage))

    def take_retry(self, stage: Stage) -> bool:
        """Count one more try because of a leg on `stage`, if there may be one; a refusal is counted too."""
        if self._books.budget.take(self.now()):
            self.metrics.retried(stage)
            return True
        self.metrics.retry_refused(stage)
        return False

    def open(self, member: Member, source: Source | None = None) -> Leg:
        """Begin a leg; the caller closes it.

        Args:
            member: Where it goes.
            source: Where the KV is that it is given, if any.
        """
        return Leg(self._books, member, source)

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

        leg.limit(times.total_s)
        tracer = self._books.tracer
        if tracer is not None:
            leg.span, outgoing = tracer.leg(leg.member, outgoing)
            if leg.primes:
                leg.span.primes()
        leg.response = await self.client.request(leg.member.origin, outgoing, times, before_send)
        leg.answered()
        return leg.response
