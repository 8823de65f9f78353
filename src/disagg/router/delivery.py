"""The last hop: an engine's answer becomes the client's, whole or as it arrives, and ends exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from disagg.errors import DisaggError, UpstreamError, UpstreamProtocolError
from disagg.http.messages import JSON_TYPE, Answer
from disagg.http.response import Response
from disagg.router.framing import Framing
from disagg.router.legs import Failure, Leg
from disagg.router.metrics import Metrics
from disagg.router.passage import Passage
from disagg.router.record import Outcome, Path, Record
from disagg.router.relay import EventRelay, error_body, error_status, relayed_headers
from disagg.router.sink import Sink, StreamFilter
from disagg.router.usage import find_usage


@dataclass(slots=True)
class Stream:
    """A leg whose answer is a stream that has begun.

    Attributes:
        leg: The leg.
        response: Its answer.
        change: What the client gets of whole events; None passes them as they are.
        fault: What has failed elsewhere and ends it.
    """

    leg: Leg
    response: Response
    change: StreamFilter | None = None
    fault: Failure | None = None

    def break_off(self, failure: Failure, error: DisaggError) -> None:
        """End it because of what has failed elsewhere."""
        self.fault = replace(failure, error=error)
        self.response.close()
        self.response.fail(UpstreamError(error.message))


class Delivery:
    """Sends one client its answer.

    Args:
        respond: Who gets it: the client, or what collects parts of its answer.
        record: Gets the status and the time of the first byte.
        metrics: Gets the times of a stream's events.
        now: Monotonic seconds.
        framing: How streams of this API end.

    Attributes:
        recoverable: A stream that fails when it has begun is not ended here: it may go on elsewhere.
        why_not: Why streams are not recoverable, as a slug; empty if that is not wanted.
    """

    def __init__(
        self, respond: Sink, record: Record, metrics: Metrics, now: Callable[[], float], framing: Framing
    ) -> None:
        self.recoverable = False
        self.why_not = ""
        self._respond = respond
        self._record = record
        self._metrics = metrics
        self._now = now
        self._framing = framing
        self._passage = Passage(framing.error_mark, now)

    @property
    def started(self) -> bool:
        """The client has been sent something."""
        return self._respond.started

    def send(self, answer: Answer) -> None:
        """Send a whole answer."""
        record = self._record
        record.status = answer.status
        record.bytes_sent = len(answer.body)
        if answer.status < 400:
            record.first_byte_at = self._now()
            self._take_usage(answer.body)
        self._respond.send(answer.status, answer.body, [*record.headers(), *answer.headers])

    async def stream(self, stream: Stream) -> Failure | None:
        """Relay a stream to its end.

        Returns:
            What went wrong, if the client has not been sent anything of it yet: then another instance may be tried.
            A stream that fails later ends with an error event, unless it is recoverable.
        """
        response, respond = stream.response, self._respond
        change = stream.change
        passage = self._passage
        passage.restart()

        def write(data: bytes) -> None:
            self._write(stream, data if change is None else change(data))

        relay = EventRelay(write, passage, self._framing, holds_errors=change is not None and self.recoverable)
        if change is None:
            relay.shortcut = respond

        def on_flow(writable: bool) -> None:
            if writable:
                response.resume()
            else:
                passage.interrupt()
                response.pause()

        respond.on_flow(on_flow)
        with stream.leg as leg:
            try:
                await response.relay(relay, passage)
            except UpstreamError as error:
                return self._break_off(relay, stream.fault or leg.fail(error))
            finally:
                self._record.bytes_sent += passage.size
            if relay.rejected:
                return _rejected(leg, relay.rejected)
            if relay.held:
                return _broken(leg, relay.held)
            if not (relay.ended or relay.saw_error):
                end = UpstreamProtocolError("the stream ended without its last event.")
                return self._break_off(relay, leg.fail(end))
            leg.outcome = "ok" if not relay.saw_error else "refused" if relay.refused else "broken"
        if relay.saw_error:
            self._record.outcome = Outcome.BROKEN
            self._record.error = f"{leg.member.stage}-{leg.outcome}"
            self._record.detail = f"{leg.member.name} put an error into its stream"
        else:
            self._take_usage(relay.end())
        respond.finish(relay.rest())
        return None

    def _write(self, stream: Stream, data: bytes) -> None:
        respond, passage = self._respond, self._passage
        passage.note(len(data))
        if respond.started:
            respond.write(data)
            return
        record, response, now = self._record, stream.response, self._now()
        stream.leg.served(now)
        record.first_byte_at = now
        passage.begin(self._metrics.stream_began(record.path, now - record.started_at), now)
        record.status = response.status
        respond.start(response.status, [*record.headers(), *relayed_headers(response.headers)], first=data)

    def _take_usage(self, answer: bytes) -> None:
        """Note the size of an answer, if it tells it. Where prefill has counted the prompt, its numbers stay."""
        usage = find_usage(answer)
        if usage is not None:
            record = self._record
            record.completion_tokens = usage.completion
            if record.path is not Path.DISAGGREGATED:
                record.prompt_tokens = usage.prompt
                record.cached_tokens = usage.cached

    def _break_off(self, relay: EventRelay, failure: Failure) -> Failure | None:
        """The engine is gone in mid-stream: tell the client once, and end."""
        if not relay.started:
            return failure
        if relay.ended:
            self._respond.finish()
            return None
        if self.recoverable:
            # Silence is as good a reason to go on elsewhere as a broken connection.
            return replace(failure, retry=True)
        self.break_off(failure, self.why_not)
        return None

    def break_off(self, failure: Failure, why: str = "") -> None:
        """End a stream that has begun with an error event.

        Args:
            failure: What ends it.
            why: Why it does not go on elsewhere, as a slug; empty if that was never meant.
        """
        record = self._record
        record.outcome = Outcome.BROKEN
        record.error = f"{failure.stage}-{failure.outcome}"
        record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
        if why:
            record.detail += f", not recovered: {why}"
            self._metrics.stream_recovered(why)
        error = failure.error or UpstreamError(f"{failure.stage.capitalize()} instance {failure.instance} failed.")
        if why:
            error = type(error)(error.message, hint=f"The stream could not be recovered: {why}.")
        self._respond.finish(self._framing.broken(error))

    def complete(self, ending: bytes) -> None:
        """End a stream of which only the end is missing."""
        self._record.bytes_sent += len(ending)
        self._take_usage(ending)
        self._respond.finish(ending)


def _broken(leg: Leg, held: bytes) -> Failure:
    """The engine put an error into a stream that has begun."""
    leg.outcome = "broken"
    status = error_status(held)
    said = UpstreamError(f"{leg.member.stage.capitalize()} instance {leg.member.name} failed in mid-stream.")
    return Failure(
        leg.member.stage, leg.member.name, "broken", retry=status >= 500, crashed=status >= 500, error=said
    )


def _rejected(leg: Leg, event: bytes) -> Failure:
    """The stream began with an engine's error: the same as an answer of that status."""
    leg.outcome = "failed"
    answer = Answer(error_status(event), error_body(event), (JSON_TYPE,))
    return Failure(leg.member.stage, leg.member.name, "failed", retry=True, crashed=True, answer=answer)
