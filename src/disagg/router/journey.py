"""The journey of one request: prefill leg, handle, decode leg, and what happens when one of them fails.

::

    attempt:  pick P -> prefill leg -> handle (checked, stamped) -> pick D -> decode leg -> answer
              |- P refuses with 4xx ----------------------------------> its answer
              |- P or D fails before the client has a byte -----------> next attempt, fresh key, other instances
              |- no P can be reached, and not strict -----------------> D alone (path local)
    together: where the dialect wants it, both legs leave at once (`disagg.router.pair`)
    several:  choices of one prompt find its KV in D's cache, where a leg of its own puts it (`disagg.router.priming`)
    answer:   a stream is relayed in whole events; anything else is read to its end first
    recovery: where it is on, a stream whose D dies is prefilled again with what was sent, and goes on
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Body, Order, Transfer
from disagg.errors import DisaggError, HandoffError, NoInstanceError, NotDisaggregableError, UpstreamError
from disagg.http.messages import Answer
from disagg.router.affinity import Hints
from disagg.router.delivery import Delivery, Stream
from disagg.router.fleet import Member
from disagg.router.framing import FRAMINGS
from disagg.router.handoff import Handoff
from disagg.router.intake import Intake
from disagg.router.legs import Failure
from disagg.router.pair import Pair
from disagg.router.priming import Priming, failure_of
from disagg.router.record import Path, Record
from disagg.router.recovery import Recovery
from disagg.router.route import Route
from disagg.router.sink import Merge, Sink
from disagg.router.steps import Steps
from disagg.topology.spec import Stage

# Requests that were on this many engines when those died are not given to another one.
_MAX_CRASHES = 2
# Why prefill did not work, as the reason for another path tells it.
_REASONS = {"unreachable": "prefill-unreachable", "no-handle": "no-handle"}


class Journey:
    """Serves one request. `run` is called once.

    Args:
        route: What all requests share.
        intake: The request.
        record: Gets its story.
        respond: Gets its answer.
        merge: How prefill's answer becomes a part of it; None if decode's answer is the client's.
    """

    def __init__(
        self, route: Route, intake: Intake, record: Record, respond: Sink, *, merge: Merge | None = None
    ) -> None:
        self._route = route
        self._legs = route.legs
        self._intake = intake
        self._record = record
        self._merge = merge
        self._delivery = Delivery(respond, record, route.legs.metrics, route.legs.now, FRAMINGS[intake.api])
        ends_at = record.started_at + route.spec.request_timeout_s
        self._steps = Steps(route, intake, ends_at, keeps_answer=merge is not None)
        self._avoided: set[str] = set()
        self._excluded: set[str] = set()
        self._crashes = 0
        self._handoff: Handoff | None = None
        self._pair: Pair | None = None
        self._priming: Priming | None = None
        self._failure: Failure | None = None
        self._hints: Hints | None = None
        self._why_no_prefill = "no-prefill-instance"
        self._recovery: Recovery | None = None
        if route.spec.recover_streams and intake.stream:
            self._recovery = Recovery(intake.api, intake.body, can_continue=route.dialect.takes_prompt_ids)
            self._delivery.recoverable = self._recovery.refusal is None
            self._delivery.why_not = self._recovery.refusal or ""
            if self._delivery.recoverable:
                self._go_on_with(self._recovery.leg_body(), ())

    async def run(self) -> None:
        """Serve the request to its end.

        Raises:
            DisaggError: If it cannot be served and the client has not been sent anything.
        """
        self._hints = await self._legs.affinity.hints(self._intake)
        self._choose_path()
        served = False
        try:
            outcome = await self._attempts()
            if outcome is not None:
                self._delivery.send(outcome)
            served = True
        except DisaggError as error:
            failure = self._failure
            if failure is None or not self._delivery.started:
                raise
            self._delivery.break_off(failure, error.kind)
        finally:
            self._settle(served=served)

    def _settle(self, *, served: bool) -> None:
        """The request is over: what becomes of the KV that prefill holds for it, and of legs that are still open."""
        handoff, pair = self._handoff, self._pair
        if pair is not None:
            handoff = pair.handoff
            if served:
                pair.finish()
            else:
                pair.leave()
        elif handoff is not None and handoff.used:
            # Decode has something to say only once it has the KV.
            fetched = self._record.first_byte_at > 0
            handoff.unpin(None if fetched else handoff.since + self._route.lease_s)
        elif handoff is not None:
            self._route.releases.release(handoff, "client-left-or-failed", self._intake)
        if handoff is not None:
            self._record.prefill_s = handoff.took_s
            self._record.prompt_tokens = handoff.handle.prompt_tokens
            self._record.cached_tokens = handoff.handle.cached_tokens or 0
            self._legs.affinity.learn(self._hints, handoff.handle.prompt_tokens)

    def _choose_path(self) -> None:
        record, route = self._record, self._route
        if route.serving is Stage.COLOCATED:
            record.path = Path.COLOCATED
            return
        if not self._legs.fleet.needs(Stage.PREFILL):
            self._go_local("no-prefill-pool", None)
            return
        reason = route.dialect.local_reason(self._intake.api, self._intake.body)
        if reason is not None:
            self._go_local(reason, _cannot_be_split(reason))
            return
        if route.dialect.can_decode_alone and not route.spec.strict:
            reason = self._legs.affinity.local_reason(self._hints, route.serving)
        if reason is not None:
            self._go_local(reason, None)
            return
        record.path = Path.DISAGGREGATED
        if route.dialect.primes and self._merge is not None:
            # There is something to merge whenever there are several choices.
            several = bodies.several(self._intake.api, self._intake.body)
            self._priming = Priming(self._steps, several) if several is not None else None

    def _go_local(self, reason: str, refusal: DisaggError | None) -> None:
        """Let decode do it all, which is visible, or refused where the deployment is strict or decode cannot."""
        if not self._route.dialect.can_decode_alone:
            raise refusal or NotDisaggregableError(
                f"A decode instance of this engine computes no prompts ({reason}).", hint="Add a prefill pool."
            )
        if self._route.spec.strict and refusal is not None:
            raise refusal
        self._record.path = Path.LOCAL
        self._record.reason = reason
        self._record.primed = self._record.prefill = ""

    async def _attempts(self) -> Answer | None:
        """Try until an answer is there or has been streamed (None), or nothing more may be tried."""
        while True:
            outcome = await self._attempt()
            if isinstance(outcome, Answer):
                return self._merged(outcome)
            failure = await self._stream(outcome) if isinstance(outcome, Stream) else outcome
            if failure is None:
                return None
            self._failure = failure
            self._let_go(failure)
            goes_on = self._may_retry(failure)
            if self._delivery.started:
                if not self._recover(failure, may_retry=goes_on):
                    return None
            elif not goes_on:
                return self._give_up(failure)
            self._record.retries += 1

    def _recover(self, failure: Failure, *, may_retry: bool) -> bool:
        """A stream has failed when it had begun: go on elsewhere, or end it.

        Returns:
            Whether a further attempt is to be made.
        """
        recovery = self._recovery
        obstacle = recovery.obstacle if recovery is not None else "off"
        if recovery is None or obstacle is not None:
            self._delivery.break_off(failure, obstacle or "")
            return False
        if recovery.complete:
            self._legs.metrics.stream_recovered("completed")
            self._delivery.complete(recovery.ending())
            return False
        if not may_retry:
            self._delivery.break_off(failure, "no-retry-left")
            return False
        self._legs.metrics.stream_recovered("resumed")
        self._go_on_with(*recovery.resume())
        return True

    def _go_on_with(self, body: Body, prompt_ids: Sequence[int]) -> None:
        """Send this body from now on."""
        intake = self._intake
        told = Intake(intake.api, body, intake.stream, intake.headers)
        self._steps = msgspec.structs.replace(self._steps, intake=told, prompt_ids=prompt_ids)

    def _let_go(self, failure: Failure) -> None:
        """An attempt has failed: its legs are ended, and KV that decode was given and does not read is released."""
        if failure.stage is Stage.PREFILL and failure.outcome in _REASONS:
            self._why_no_prefill = _REASONS[failure.outcome]
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.give_up(failure)
        elif failure.answer is not None and self._handoff is not None and self._handoff.used:
            self._route.releases.release(self._handoff, "decode-failed", self._intake)

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
            and self._legs.now() < self._steps.ends_at
            and self._legs.take_retry(failure.stage)
        )

    def _give_up(self, failure: Failure) -> Answer:
        self._record.error = f"{failure.stage}-{failure.outcome}"
        self._record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
        if failure.answer is not None:
            return failure.answer
        raise failure.error or DisaggError("Internal server error")

    async def _attempt(self) -> Answer | Stream | Failure:
        key = self._route.new_key()
        if not self._legs.can_pick(self._route.serving, self._excluded):
            # Before prefill makes KV that nobody would fetch.
            raise self._no_instance(self._route.serving)
        if self._record.path is Path.DISAGGREGATED and not self._steps.is_usable(self._handoff):
            self._drop_handoff("not-used")
            prefill = self._pick(Stage.PREFILL)
            if prefill is None:
                self._go_local(self._why_no_prefill, self._no_instance(Stage.PREFILL))
            elif self._priming is not None:
                return await self._primed(self._priming, prefill, key)
            elif self._route.dialect.pairs_first:
                return await self._as_pair(prefill, self._pick_serving(), key, self._steps)
            else:
                failure = await self._prefill(prefill, Transfer(key, prefill.peer))
                if failure is not None:
                    return failure
        return await self._decode(self._pick_serving(), key, self._steps)

    async def _as_pair(self, prefill: Member, decode: Member, key: str, carrying: Steps) -> Answer | Stream | Failure:
        """Legs whose instances have to know of each other before the first one leaves."""
        self._record.prefill, self._record.decode = prefill.name, decode.name
        try:
            peer = await self._route.introductions.peer(prefill)
        except UpstreamError as error:
            return Failure(Stage.PREFILL, prefill.name, "unreachable", retry=True, refused=True, error=error)
        transfer = Transfer(key, peer, decode.peer)
        if self._route.dialect.order is Order.CONCURRENT:
            self._pair = Pair(carrying, prefill, decode, transfer)
            return await self._pair.run()
        failure = await self._prefill(prefill, transfer)
        if failure is not None:
            return failure
        if not self._legs.fleet.is_current(decode):
            # What prefill has sent went with that process.
            self._drop_handoff("not-used")
            gone = HandoffError(f"Decode instance {decode.name} was gone when its KV had arrived.")
            return Failure(decode.stage, decode.name, "unreachable", retry=True, error=gone)
        return await self._decode(decode, key, carrying)

    async def _primed(self, priming: Priming, prefill: Member, key: str) -> Answer | Stream | Failure:
        """An attempt of several choices: a decode instance fetches the KV, and then answers."""
        decode = self._pick_serving()
        obstacle = await priming.obstacle(decode)
        if obstacle is None:
            failure = failure_of(await self._as_pair(prefill, decode, key, priming.carrying), decode)
            if failure is not None:
                return failure
            pair, self._pair = self._pair, None
            if pair is not None:
                pair.finish()
                self._handoff = pair.handoff
            prompt_tokens = 0
            if self._handoff is not None:
                self._handoff.fetched()
                prompt_tokens = self._handoff.handle.prompt_tokens
            obstacle = await priming.obstacle(decode, prompt_tokens)
        if obstacle is not None:
            self._go_local(obstacle, _cannot_be_split(obstacle))
            return await self._decode(decode, self._route.new_key(), self._steps)
        self._record.primed = priming.why
        return await priming.answer(decode)

    def _pick_serving(self) -> Member:
        serving = self._pick(self._route.serving)
        if serving is None:
            raise self._no_instance(self._route.serving)
        return serving

    def _pick(self, stage: Stage) -> Member | None:
        return self._legs.pick(stage, self._avoided, self._excluded, self._hints)

    def _no_instance(self, stage: Stage) -> DisaggError:
        """No instance is left: because of failures of this request, or because none is ready."""
        failure = self._failure
        if failure is not None and failure.error is not None and failure.stage is stage:
            return failure.error
        return NoInstanceError(f"No {stage} instance is ready.", hint="See /health for the state of each instance.")

    async def _prefill(self, member: Member, transfer: Transfer) -> Failure | None:
        """Run the prefill leg; on success `_handoff` is set."""
        self._record.prefill = member.name
        outcome = await self._steps.prefill(member, transfer)
        if isinstance(outcome, Handoff):
            self._handoff = outcome
            return None
        return outcome

    async def _decode(self, member: Member, key: str, steps: Steps) -> Answer | Stream | Failure:
        self._record.decode = member.name
        handoff = self._handoff if self._record.path is Path.DISAGGREGATED else None
        transfer = handoff.transfer if handoff is not None else None
        outcome = await steps.decode(member, key, transfer, handoff, steps.sending(handoff))
        if isinstance(outcome, Failure) and outcome.outcome == "stale-handle":
            self._drop_handoff("stale")
        return outcome

    def _drop_handoff(self, reason: str) -> None:
        handoff, self._handoff = self._handoff, None
        if handoff is None:
            return
        if handoff.used:
            fetched = self._delivery.started
            handoff.unpin(None if fetched else handoff.since + self._route.lease_s)
        else:
            self._legs.metrics.handoff_failed(reason)
            self._route.releases.release(handoff, reason, self._intake)

    # The answer.

    def _merged(self, answer: Answer) -> Answer:
        if self._merge is None:
            return answer
        prefilled = self._prefilled_answer()
        if not prefilled:
            return answer
        return Answer(answer.status, self._merge.whole(self._intake.api, prefilled, answer.body), answer.headers)

    async def _stream(self, stream: Stream) -> Failure | None:
        if self._merge is not None:
            prefilled = self._prefilled_answer()
            if prefilled:
                try:
                    stream.change = self._merge.stream(self._intake.api, prefilled)
                except UpstreamError:
                    stream.leg.close()
                    raise
        if self._recovery is not None and self._delivery.recoverable:
            stream.change = self._recovery.behind(stream.change)
        return await self._delivery.stream(stream)

    def _prefilled_answer(self) -> bytes:
        """Prefill's answer, if the request took the disaggregated way."""
        handoff = self._pair.handoff if self._pair is not None else self._handoff
        return handoff.answer if handoff is not None and self._record.path is Path.DISAGGREGATED else b""


def _cannot_be_split(reason: str) -> NotDisaggregableError:
    return NotDisaggregableError(
        f"This request cannot be split over prefill and decode ({reason}).",
        hint="The deployment refuses what would run on the decode side alone.",
    )
