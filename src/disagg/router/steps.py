"""The two legs of one request: what each of them is sent, how long it may take, and what its answer means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from disagg.engines.base import Order, Transfer
from disagg.errors import HandoffError, UpstreamError, UpstreamTimeoutError
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Answer, Header
from disagg.http.origin import Outgoing
from disagg.router.delivery import Stream
from disagg.router.fleet import Member
from disagg.router.handoff import Handoff, is_of, seems_replaced
from disagg.router.intake import Intake
from disagg.router.legs import Failure, Leg, Source
from disagg.router.recovery import with_prompt_ids
from disagg.router.relay import hide_internal, is_event_stream, relayed_headers
from disagg.router.route import Route
from disagg.topology.spec import Stage

# Nobody sees the first output of an answer that is not streamed, and KV has landed long before its last one.
_WHOLE_LINGER_S = 5.0
# A prefill whose client leaves is ended, but one that ends in the same moment has KV that somebody has to let go. An
# engine finishes the step that it is in whatever happens to its requests; most steps are shorter than this.
_PREFILL_LINGER_S = 1.0


@dataclass(slots=True)
class Sending:
    """A decode leg as others see it.

    Attributes:
        linger_s: How long it may go on for its first output when it is given up, in seconds.
        source: Whose KV it is given; None for a run on decode alone.
        left: The request has left for the engine.
        primes: It only fetches the KV, for another leg.
    """

    linger_s: float
    source: Source | None = None
    left: bool = False
    primes: bool = False


class Steps(msgspec.Struct, frozen=True):
    """Sends the legs of one request.

    Attributes:
        route: What all requests share.
        intake: The request.
        ends_at: When its time is over, monotonic seconds.
        keeps_answer: Prefill's answer is needed for the client's.
        prompt_ids: Token ids that are the prompt, whatever the body has for one; empty for the body's own.
        primes: The decode leg with the KV only fetches it: another one answers.
        cache_key: Decode legs with the same one need the same prefix cache; empty if it does not matter.
    """

    route: Route
    intake: Intake
    ends_at: float
    keeps_answer: bool
    prompt_ids: Sequence[int] = ()
    primes: bool = False
    cache_key: str = ""

    async def prefill(self, member: Member, transfer: Transfer) -> Handoff | Failure:
        """Let `member` compute the prompt and keep its KV."""
        intake, route = self.intake, self.route
        dialect = route.dialect
        with route.legs.open(member) as leg:
            try:
                body = dialect.prefill_body(intake.api, intake.body, transfer)
            except HandoffError as error:
                return _no_handle(leg, error)
            if self.prompt_ids:
                body = with_prompt_ids(body, self.prompt_ids)
            headers = (*self._headers(transfer.key), *dialect.prefill_headers(transfer))
            late = None
            if dialect.order is not Order.CONCURRENT:
                # Where decode was told of the transfer, it may be reading, and nothing may be let go.
                late = partial(route.releases.take_late, transfer=transfer, prefill=member, intake=intake)
            outgoing = Outgoing("POST", intake.api, headers, body, linger=_a_moment if late else None, late=late)
            limit_s = min(route.spec.prefill_timeout_s, self.remaining())
            try:
                response = await route.legs.send(leg, outgoing, LegTimes(limit_s, limit_s, limit_s))
                answer = await response.read()
            except UpstreamError as error:
                return leg.fail(error)
            if response.status != 200:
                return leg.refuse(response, answer)
            leg.outcome = "ok"
            try:
                handle = dialect.read_handle(answer)
            except HandoffError as error:
                route.legs.metrics.handoff_failed("no-handle")
                return _no_handle(leg, error)
            kept = answer if self.keeps_answer else b""
            handoff = Handoff(handle, transfer, member, route.legs.now(), leg.seconds, kept)
            handoff.pin()
            if not is_of(handle, member):
                leg.outcome = "foreign-engine"
                route.legs.metrics.handoff_failed("foreign-engine")
                route.releases.leave(handoff, "foreign-engine")
                foreign = HandoffError(
                    f"{member.name} answered with KV of engine {handle.engine_id}, which it is not."
                )
                return Failure(member.stage, member.name, "foreign-engine", retry=True, error=foreign)
            if seems_replaced(handle, member):
                route.legs.fleet.doubt(member, changed=True)
            return handoff

    @property
    def linger_s(self) -> float:
        """How long a decode leg may go on for its first output when its client leaves, in seconds."""
        limit_s = self.route.linger_s
        return limit_s if self.intake.stream or self.primes else min(limit_s, _WHOLE_LINGER_S)

    def sending(self, handoff: Handoff | None) -> Sending:
        """A decode leg that is about to be sent with this KV, or without any."""
        if handoff is None:
            return Sending(0.0)
        source = Source(handoff.member, handoff.since, answered=True)
        return Sending(self.linger_s, source, primes=self.primes)

    async def decode(
        self,
        member: Member,
        key: str,
        transfer: Transfer | None,
        handoff: Handoff | None,
        sending: Sending,
    ) -> Answer | Stream | Failure:
        """Let `member` answer the client.

        Args:
            member: A decode or colocated instance.
            key: The leg's id.
            transfer: The attempt, if KV is handed over.
            handoff: What prefill has made for it, where the legs leave one after the other.
            sending: Is kept up to date; read when the caller is cancelled.
        """
        intake, route = self.intake, self.route
        leg = route.legs.open(member, sending.source)
        leg.primes = sending.primes
        keep_open = False

        def before_leaving() -> None:
            if handoff is not None:
                if not self.is_usable(handoff):
                    raise HandoffError(
                        "The prefilled KV was too old, or its engine gone, before decode could be sent."
                    )
                handoff.used = True
            sending.left = True

        try:
            handle = handoff.handle if handoff is not None else None
            body = route.dialect.decode_body(intake.api, intake.body, transfer, handle)
            if self.prompt_ids:
                body = with_prompt_ids(body, self.prompt_ids)
            tied = transfer is not None
            linger = (lambda: sending.linger_s) if tied else None
            headers = self._headers(key)
            if self.cache_key:
                headers += route.dialect.cache_headers(member.peer, self.cache_key)
            # A kept connection that breaks may have brought the request before it did: the handle could be spent.
            outgoing = Outgoing("POST", intake.api, headers, body, resend=not tied, linger=linger)
            response = await route.legs.send(leg, outgoing, self._decode_times(), before_leaving)
            if response.status == 200 and is_event_stream(response):
                keep_open = True
                return Stream(leg, response)
            answer = await response.read()
            if response.status != 200:
                return leg.refuse(response, answer)
            leg.outcome = "ok"
            if sending.primes:
                leg.served(route.legs.now())  # its only token came a moment ago
            return Answer(response.status, hide_internal(answer), tuple(relayed_headers(response.headers)))
        except HandoffError as error:
            return Failure(member.stage, member.name, "stale-handle", retry=True, error=error)
        except UpstreamError as error:
            return leg.fail(error)
        finally:
            if not keep_open:
                leg.close()

    def is_usable(self, handoff: Handoff | None) -> bool:
        """Whether decode may be sent with this handle."""
        route = self.route
        return (
            handoff is not None
            and not handoff.used
            and route.legs.fleet.is_current(handoff.member)
            and route.legs.now() - handoff.since <= route.max_handle_age_s
        )

    def remaining(self) -> float:
        """Seconds that the request still has.

        Raises:
            UpstreamTimeoutError: If there are none.
        """
        remaining_s = self.ends_at - self.route.legs.now()
        if remaining_s <= 0:
            raise UpstreamTimeoutError(f"The request was not served in {self.route.spec.request_timeout_s:g} s.")
        return remaining_s

    def _decode_times(self) -> LegTimes:
        spec = self.route.spec
        remaining_s = self.remaining()
        # An answer that is not streamed shows its first byte when it is complete.
        first_s = min(spec.first_token_timeout_s, remaining_s) if self.intake.stream or self.primes else remaining_s
        return LegTimes(first_s, spec.idle_timeout_s, remaining_s)

    def _headers(self, key: str) -> tuple[Header, ...]:
        return (JSON_TYPE, (b"x-request-id", key.encode()), *self.intake.headers)


def _no_handle(leg: Leg, error: HandoffError) -> Failure:
    member = leg.member
    leg.outcome = "no-handle"
    return Failure(Stage.PREFILL, member.name, "no-handle", retry=True, refused=True, error=error)


def _a_moment() -> float:
    return _PREFILL_LINGER_S
