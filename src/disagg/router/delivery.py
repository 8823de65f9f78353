"""The last hop: an engine's answer becomes the client's, whole or as it arrives, and ends exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import DisaggError, UpstreamError, UpstreamProtocolError
from disagg.http.messages import JSON_TYPE, Answer
from disagg.http.responder import Responder
from disagg.http.response import Response
from disagg.router.legs import Failure, Leg
from disagg.router.record import Outcome, Record
from disagg.router.relay import EventRelay, error_body, error_event, error_status, relayed_headers


@dataclass(frozen=True, slots=True)
class Stream:
    """A leg whose answer is a stream that has begun."""

    leg: Leg
    response: Response


class Delivery:
    """Sends one client its answer.

    Args:
        respond: The client.
        record: Gets the status and the time of the first byte.
        now: Monotonic seconds.
    """

    def __init__(self, respond: Responder, record: Record, now: Callable[[], float]) -> None:
        self._respond = respond
        self._record = record
        self._now = now

    def send(self, answer: Answer) -> None:
        """Send a whole answer."""
        record = self._record
        record.status = answer.status
        if answer.status < 400:
            record.first_byte_at = self._now()
        self._respond.send(answer.status, answer.body, [*record.headers(), *answer.headers])

    async def stream(self, stream: Stream) -> Failure | None:
        """Relay a stream to its end.

        Returns:
            What went wrong, if the client has not been sent anything yet: then another instance may be tried. A
            stream that fails later ends with an error event.
        """
        response, respond = stream.response, self._respond
        relay = EventRelay(lambda data: self._write(stream, data))
        respond.on_flow(lambda writable: response.resume() if writable else response.pause())
        with stream.leg as leg:
            try:
                await response.relay(relay)
            except UpstreamError as error:
                return self._break_off(relay, leg.fail(error))
            if relay.rejected:
                return _rejected(leg, relay.rejected)
            if not (relay.ended or relay.saw_error):
                end = UpstreamProtocolError("the stream ended without data: [DONE].")
                return self._break_off(relay, leg.fail(end))
            leg.outcome = "ok" if not relay.saw_error else "refused" if relay.refused else "broken"
        if relay.saw_error:
            self._record.outcome = Outcome.BROKEN
            self._record.detail = f"{leg.member.name} put an error into its stream"
        respond.finish(relay.rest())
        return None

    def _write(self, stream: Stream, data: bytes) -> None:
        respond = self._respond
        if respond.started:
            respond.write(data)
            return
        record, response = self._record, stream.response
        stream.leg.served()
        record.first_byte_at = self._now()
        record.status = response.status
        respond.start(response.status, [*record.headers(), *relayed_headers(response.headers)], first=data)

    def _break_off(self, relay: EventRelay, failure: Failure) -> Failure | None:
        """The engine is gone in mid-stream: tell the client once, and end."""
        if not relay.started:
            return failure
        if relay.ended:
            self._respond.finish()
            return None
        self._record.outcome = Outcome.BROKEN
        self._record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
        self._respond.finish(error_event(failure.error or DisaggError("Internal server error")))
        return None


def _rejected(leg: Leg, event: bytes) -> Failure:
    """The stream began with an engine's error: the same as an answer of that status."""
    leg.outcome = "failed"
    answer = Answer(error_status(event), error_body(event), (JSON_TYPE,))
    return Failure(leg.member.stage, leg.member.name, "failed", retry=True, crashed=True, answer=answer)
