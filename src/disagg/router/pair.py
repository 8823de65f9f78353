"""One attempt whose legs leave together: each leg's end decides what becomes of the other.

::

    P fails             -> D is given up at once, P's failure is the attempt's (its 4xx is the client's answer)
    D fails             -> P is given up at once, D's failure is the attempt's
    D begins to answer  -> the KV has arrived: the answer goes out, and P is watched until it ends
    P fails after that  -> the stream ends with an error event
    the client leaves   -> P is given up at once, D after its first output, because KV may just be landing on it
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from disagg.engines.base import Transfer
from disagg.errors import HandoffError
from disagg.http.messages import Answer
from disagg.router.delivery import Stream
from disagg.router.fleet import Member
from disagg.router.handoff import Handoff
from disagg.router.legs import Failure, Source
from disagg.router.steps import Sending, Steps

_T = TypeVar("_T")


class Pair:
    """Runs both legs of one attempt: `run` once, and then one of `finish`, `give_up` and `leave`.

    Args:
        steps: Sends the legs.
        prefill: Who computes the prompt.
        decode: Who answers.
        transfer: What ties the legs.
    """

    def __init__(self, steps: Steps, prefill: Member, decode: Member, transfer: Transfer) -> None:
        self._steps = steps
        self._releases = steps.route.releases
        self._members = (prefill, decode)
        self._transfer = transfer
        source = Source(prefill, steps.route.legs.now(), answered=False)
        self._sending = Sending(steps.linger_s, source, primes=steps.primes)
        loop = asyncio.get_running_loop()
        self._prefilling = loop.create_task(steps.prefill(prefill, transfer))
        self._decoding = loop.create_task(steps.decode(decode, transfer.key, transfer, None, self._sending))
        for task in (self._prefilling, self._decoding):
            task.add_done_callback(_retrieve)
        self._handed_on = False

    @property
    def handoff(self) -> Handoff | None:
        """What prefill has made, once it has."""
        outcome = _outcome(self._prefilling)
        return outcome if isinstance(outcome, Handoff) else None

    async def run(self) -> Answer | Stream | Failure:
        """Run the legs until there is an answer or a failure.

        Raises:
            DisaggError: If the request's time is over.
        """
        prefilling, decoding = self._prefilling, self._decoding
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if not prefilling.done() and isinstance(outcome := decoding.result(), Failure):
            return outcome
        if self._steps.keeps_answer:
            # Prefill's answer is a part of the client's.
            await asyncio.wait({prefilling})
        if prefilling.done() and isinstance(failed := prefilling.result(), Failure):
            return failed
        await asyncio.wait({decoding})
        outcome = decoding.result()
        if not isinstance(outcome, Failure):
            self._handed_on = True
        if isinstance(outcome, Stream):
            self._watch(outcome)
        return outcome

    def _watch(self, stream: Stream) -> None:
        """A prefill that fails now has not computed what decode goes on with."""

        def ended(task: asyncio.Task[Handoff | Failure]) -> None:
            outcome = _outcome(task)
            if isinstance(outcome, Failure):
                error = outcome.error or HandoffError(f"Prefill instance {outcome.instance} refused the request.")
                stream.break_off(outcome, error)

        self._prefilling.add_done_callback(ended)

    def finish(self) -> None:
        """The client has its whole answer, so the KV has arrived; prefill may still have its own answer to send."""
        if self._prefilling.done():
            if self.handoff is not None:
                self.handoff.unpin(None)
        elif not self._releases.background.spawn(_see_off(self._prefilling)):
            self._prefilling.cancel()

    def give_up(self, failure: Failure) -> None:
        """The attempt has failed: neither leg is needed any more."""
        self._sending.linger_s = 0.0
        self._cancel(self._prefilling, self._members[0])
        self._cancel(self._decoding, self._members[1])
        nobody_reads = not self._sending.left or failure.answer is not None
        self._let_go("decode-failed" if self._sending.left else "not-sent", nobody_reads=nobody_reads)

    def leave(self) -> None:
        """The client has left, or is answered no more."""
        self._cancel(self._prefilling, self._members[0])
        if self._decoding.done():
            self._close_unread()
        else:
            # KV may be landing on it just now: it closes after its first output.
            self._decoding.cancel()
        self._let_go("client-left", nobody_reads=not self._sending.left)

    def _cancel(self, task: asyncio.Task[Any], member: Member) -> None:
        if not task.done():
            task.cancel()
            self._releases.abort(member, self._transfer, self._steps.intake.headers)
        elif task is self._decoding:
            self._close_unread()

    def _close_unread(self) -> None:
        outcome = _outcome(self._decoding)
        if isinstance(outcome, Stream) and not self._handed_on:
            outcome.leg.close()

    def _let_go(self, reason: str, *, nobody_reads: bool) -> None:
        handoff = self.handoff
        if handoff is None:
            # A prefill that was cut off may have finished on its engine; one that failed has kept nothing.
            if nobody_reads and not isinstance(_outcome(self._prefilling), Failure):
                self._releases.forget(self._transfer, self._members[0], self._steps.intake)
        elif nobody_reads:
            self._releases.release(handoff, reason, self._steps.intake)
        elif self._handed_on:
            handoff.unpin(None)
        else:
            handoff.unpin(handoff.since + self._steps.route.lease_s)


def _outcome(task: asyncio.Task[_T]) -> _T | None:
    """What a task has returned; None if it has not, or not yet."""
    done = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if done else None


def _retrieve(task: asyncio.Task[Any]) -> None:
    """A leg that ran out of time after nobody waited for it any more has told nobody, which is no fault."""
    if not task.cancelled():
        task.exception()


async def _see_off(task: asyncio.Task[Handoff | Failure]) -> None:
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
        outcome = _outcome(task)
        if isinstance(outcome, Handoff):
            outcome.unpin(None)
