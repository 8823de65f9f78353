"""The journey of one request: prefill leg, handle, decode leg, and what happens when one of them fails.

::

    attempt:  pick P -> prefill leg -> handle (checked, stamped) -> pick D -> decode leg -> answer
              |- P refuses with 4xx ----------------------------------> its answer
              |- P or D fails before the client has a byte -----------> next attempt, fresh ids, other instances
              |- no P can be reached, and not strict -----------------> D alone (path local)
    answer:   a stream is relayed in whole events; anything else is read to its end first

A handle is used once. One that is older than half of the lease, or whose prefill incarnation is gone, is dropped:
decode would read blocks that belong to another prompt by now, and would not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.engines.base import Dialect, Handle
from disagg.errors import (
    DisaggError,
    HandoffError,
    NoInstanceError,
    NotDisaggregableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Answer, Header
from disagg.http.origin import Outgoing
from disagg.http.responder import Responder
from disagg.router.delivery import Delivery, Stream
from disagg.router.fleet import Member
from disagg.router.intake import Intake
from disagg.router.legs import Failure, Leg, Legs, Source
from disagg.router.record import Path, Record
from disagg.router.relay import hide_internal, is_event_stream, relayed_headers
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

# Requests that were on this many engines when those died are not given to another one.
_MAX_CRASHES = 2


@dataclass(frozen=True, slots=True)
class Route:
    """What is the same for all requests of a router.

    Attributes:
        legs: Chooses instances and sends legs.
        dialect: How legs are written.
        spec: Limits and modes.
        max_handle_age_s: A handle that is older is not used.
        lease_s: How long prefill keeps KV that nobody fetches.
        serving: The stage that answers: decode, or colocated.
        new_leg_id: A fresh id for the legs of one attempt, which no client can guess.
    """

    legs: Legs
    dialect: Dialect
    spec: RouterSpec
    max_handle_age_s: float
    lease_s: float
    serving: Stage
    new_leg_id: Callable[[], bytes]


@dataclass(slots=True)
class Handoff:
    """A handle and what it depends on.

    Attributes:
        handle: From the prefill engine.
        member: The incarnation that holds the KV.
        since: When prefill answered, monotonic seconds.
        used: A decode leg has been sent with it.
    """

    handle: Handle
    member: Member
    since: float
    used: bool = False


class Journey:
    """Serves one request. `run` is called once."""

    def __init__(self, route: Route, intake: Intake, record: Record, respond: Responder) -> None:
        self._route = route
        self._legs = route.legs
        self._intake = intake
        self._record = record
        self._delivery = Delivery(respond, record, route.legs.metrics, route.legs.now)
        self._ends_at = record.started_at + route.spec.request_timeout_s
        self._avoided: set[str] = set()
        self._excluded: set[str] = set()
        self._crashes = 0
        self._handoff: Handoff | None = None
        self._failure: Failure | None = None
        self._why_no_prefill = "no-prefill-instance"

    async def run(self) -> None:
        """Serve the request to its end.

        Raises:
            DisaggError: If it cannot be served and the client has not been sent anything.
        """
        self._choose_path()
        try:
            outcome = await self._attempts()
            if outcome is not None:
                self._delivery.send(outcome)
        finally:
            if self._handoff is not None:
                if not self._handoff.used:
                    self._legs.metrics.left_to_lease("client-left-or-failed")
                # Decode has something to say only once it has the KV.
                self._unpin(self._handoff, fetched=self._handoff.used and self._record.first_byte_at > 0)

    def _choose_path(self) -> None:
        record, route = self._record, self._route
        if route.serving is Stage.COLOCATED:
            record.path = Path.COLOCATED
            return
        if not self._legs.fleet.needs(Stage.PREFILL):
            self._go_local("no-prefill-pool", None)
            return
        reason = route.dialect.local_reason(self._intake.api, self._intake.body)
        if reason is None:
            record.path = Path.DISAGGREGATED
        else:
            self._go_local(
                reason,
                NotDisaggregableError(
                    f"This request cannot be split over prefill and decode ({reason}).",
                    hint="The deployment is strict: it refuses what would run on the decode side alone.",
                ),
            )

    def _go_local(self, reason: str, refusal: DisaggError | None) -> None:
        """Let decode do it all, which is visible, or refused where the deployment is strict."""
        if self._route.spec.strict and refusal is not None:
            raise refusal
        self._record.path = Path.LOCAL
        self._record.reason = reason
        self._record.prefill = ""

    async def _attempts(self) -> Answer | None:
        """Try until an answer is there or has been streamed (None), or nothing more may be tried."""
        while True:
            outcome = await self._attempt()
            if isinstance(outcome, Answer):
                return outcome
            failure = await self._delivery.stream(outcome) if isinstance(outcome, Stream) else outcome
            if failure is None:
                return None
            self._failure = failure
            if not self._may_retry(failure):
                return self._give_up(failure)
            self._record.retries += 1

    def _may_retry(self, failure: Failure) -> bool:
        self._crashes += failure.crashed
        (self._excluded if failure.refused else self._avoided).add(failure.instance)
        if self._record.prefill and failure.stage is not Stage.PREFILL:
            # Decode cannot tell whether it or the prefill side was at fault.
            self._avoided.add(self._record.prefill)
        return (
            failure.retry
            and self._record.retries < self._route.spec.retries
            and self._crashes < _MAX_CRASHES
            and self._legs.now() < self._ends_at
            and self._legs.take_retry(failure.stage)
        )

    def _give_up(self, failure: Failure) -> Answer:
        self._record.error = f"{failure.stage}-{failure.outcome}"
        self._record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
        if failure.answer is not None:
            return failure.answer
        raise failure.error or DisaggError("Internal server error")

    async def _attempt(self) -> Answer | Stream | Failure:
        leg_id = self._route.new_leg_id()
        if not self._legs.can_pick(self._route.serving, self._excluded):
            # Before prefill makes KV that nobody would fetch.
            raise self._no_instance(self._route.serving)
        if self._record.path is Path.DISAGGREGATED and not self._is_usable(self._handoff):
            self._drop_handoff("not-used")
            prefill = self._pick(Stage.PREFILL)
            if prefill is None:
                self._go_local(self._why_no_prefill, self._no_instance(Stage.PREFILL))
            else:
                failure = await self._prefill(prefill, leg_id)
                if failure is not None:
                    return failure
        serving = self._pick(self._route.serving)
        if serving is None:
            raise self._no_instance(self._route.serving)
        return await self._decode(serving, leg_id)

    def _pick(self, stage: Stage) -> Member | None:
        return self._legs.pick(stage, self._avoided, self._excluded)

    def _no_instance(self, stage: Stage) -> DisaggError:
        """No instance is left: because of failures of this request, or because none is ready."""
        failure = self._failure
        if failure is not None and failure.error is not None and failure.stage is stage:
            return failure.error
        return NoInstanceError(f"No {stage} instance is ready.", hint="See /health for the state of each instance.")

    # Prefill.

    async def _prefill(self, member: Member, leg_id: bytes) -> Failure | None:
        """Run the prefill leg; on success `_handoff` is set."""
        self._record.prefill = member.name
        intake, route = self._intake, self._route
        outgoing = Outgoing(
            "POST", intake.api, self._headers(leg_id), route.dialect.prefill_body(intake.api, intake.body)
        )
        limit_s = min(route.spec.prefill_timeout_s, self._remaining())
        with self._legs.open(member) as leg:
            try:
                response = await self._legs.send(leg, outgoing, LegTimes(limit_s, limit_s, limit_s))
                body = await response.read()
            except UpstreamError as error:
                if not leg.sent:
                    self._why_no_prefill = "prefill-unreachable"
                return leg.fail(error)
            if response.status != 200:
                return leg.refuse(response, body)
            leg.outcome = "ok"
            return self._take_handle(leg, body)

    def _take_handle(self, leg: Leg, body: bytes) -> Failure | None:
        member = leg.member
        try:
            handle = self._route.dialect.read_handle(body)
        except HandoffError as error:
            self._legs.metrics.handoff_failed("no-handle")
            self._why_no_prefill = "no-handle"
            leg.outcome = "no-handle"
            return Failure(member.stage, member.name, "no-handle", retry=True, refused=True, error=error)
        self._handoff = Handoff(handle, member, self._legs.now())
        member.pin()
        self._record.prompt_tokens = handle.prompt_tokens
        self._record.cached_tokens = handle.cached_tokens or 0
        if not _is_of(handle, member):
            self._drop_handoff("foreign-engine")
            leg.outcome = "foreign-engine"
            foreign = HandoffError(f"{member.name} answered with KV of engine {handle.engine_id}, which it is not.")
            return Failure(member.stage, member.name, "foreign-engine", retry=True, error=foreign)
        return None

    def _is_usable(self, handoff: Handoff | None) -> bool:
        return (
            handoff is not None
            and not handoff.used
            and self._legs.fleet.is_current(handoff.member)
            and self._legs.now() - handoff.since <= self._route.max_handle_age_s
        )

    def _drop_handoff(self, reason: str) -> None:
        handoff, self._handoff = self._handoff, None
        if handoff is None:
            return
        self._unpin(handoff, fetched=False)
        if not handoff.used:
            self._legs.metrics.handoff_failed(reason)
            self._legs.metrics.left_to_lease(reason)

    def _unpin(self, handoff: Handoff, *, fetched: bool) -> None:
        handoff.member.unpin(None if fetched else handoff.since + self._route.lease_s)

    # Decode, or the only leg.

    async def _decode(self, member: Member, leg_id: bytes) -> Answer | Stream | Failure:
        self._record.decode = member.name
        intake, route = self._intake, self._route
        handoff = self._handoff if self._record.path is Path.DISAGGREGATED else None
        outgoing = Outgoing(
            "POST",
            intake.api,
            self._headers(leg_id),
            route.dialect.decode_body(intake.api, intake.body, handoff.handle if handoff is not None else None),
            # A kept connection that breaks may have brought the request before it did: the handle could be spent.
            resend=handoff is None,
        )

        def spend_handle() -> None:
            if handoff is not None:
                if not self._is_usable(handoff):
                    raise HandoffError(
                        "The prefilled KV was too old, or its engine gone, before decode could be sent."
                    )
                handoff.used = True

        leg = self._legs.open(member, self._source(handoff))
        keep_open = False
        try:
            response = await self._legs.send(leg, outgoing, self._decode_times(), spend_handle)
            if response.status == 200 and is_event_stream(response):
                keep_open = True
                return Stream(leg, response)
            body = await response.read()
            if response.status != 200:
                return leg.refuse(response, body)
            leg.outcome = "ok"
            return Answer(response.status, hide_internal(body), tuple(relayed_headers(response.headers)))
        except HandoffError as error:
            self._drop_handoff("stale")
            return Failure(member.stage, member.name, "stale-handle", retry=True, error=error)
        except UpstreamError as error:
            return leg.fail(error)
        finally:
            if not keep_open:
                leg.close()

    def _source(self, handoff: Handoff | None) -> Source | None:
        if handoff is None:
            return None
        return Source(handoff.member, handoff.since, handoff.handle.prompt_tokens)

    def _decode_times(self) -> LegTimes:
        spec = self._route.spec
        remaining_s = self._remaining()
        # An answer that is not streamed shows its first byte when it is complete.
        first_s = min(spec.first_token_timeout_s, remaining_s) if self._intake.stream else remaining_s
        return LegTimes(first_s, spec.idle_timeout_s, remaining_s)

    # Small things.

    def _headers(self, leg_id: bytes) -> tuple[Header, ...]:
        return (JSON_TYPE, (b"x-request-id", leg_id), *self._intake.headers)

    def _remaining(self) -> float:
        """Seconds that the request still has.

        Raises:
            UpstreamTimeoutError: If there are none.
        """
        remaining_s = self._ends_at - self._legs.now()
        if remaining_s <= 0:
            raise UpstreamTimeoutError(f"The request was not served in {self._route.spec.request_timeout_s:g} s.")
        return remaining_s


def _is_of(handle: Handle, member: Member) -> bool:
    """Whether a handle comes from this incarnation, as far as its engine's id is known."""
    known = member.engine_id
    # A data-parallel engine adds its rank to the id that it was given.
    return known is None or handle.engine_id == known or handle.engine_id.startswith(f"{known}_dp")
