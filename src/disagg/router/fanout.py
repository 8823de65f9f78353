"""A completion of several prompts, as one request per prompt, each with legs of its own.

An engine keeps one prompt's KV per request, so a list would leave all prompts but the first to decode. Answers are
put together in the prompts' order, streams are interleaved as they come; the first prompt that fails ends all of
them, and the client gets its error alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api
from disagg.errors import DisaggError
from disagg.http.messages import SSE_TYPE, Answer, Header
from disagg.router.framing import DONE, OPENAI
from disagg.router.intake import Intake
from disagg.router.journey import Journey
from disagg.router.record import Outcome, Path, Record
from disagg.router.route import Route
from disagg.router.sink import Merge, Sink
from disagg.topology.spec import Stage

MAX_PROMPTS = 1024
"""Longer lists stay on one engine."""
_AT_ONCE = 16
_ERROR = OPENAI.error_mark

Fields = dict[str, msgspec.Raw]
_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_encode = msgspec.json.Encoder().encode


def is_fanned_out(route: Route, intake: Intake) -> bool:
    """Whether a request becomes one per prompt: nothing but the number of its prompts keeps it on one engine."""
    prompt = intake.body.get("prompt") if intake.api is Api.COMPLETIONS else None
    if prompt is None or route.serving is not Stage.DECODE or not bodies.holds_several(prompt):
        return False
    return (
        route.legs.fleet.needs(Stage.PREFILL)
        and route.dialect.local_reason(intake.api, intake.body) == "prompt-list"
        and bodies.prompt_count(prompt) <= MAX_PROMPTS
    )


class _PromptFailedError(Exception):
    """One prompt failed; what the client is told is in the fan-out."""


class Fanout:
    """Serves one request of several prompts. `run` is called once.

    Args:
        route: What all requests share.
        intake: The request.
        record: Gets its story.
        respond: Gets its answer.
        merge: How prefill's answer becomes a part of each prompt's; None if decode's answer is all.
    """

    def __init__(self, route: Route, intake: Intake, record: Record, respond: Sink, merge: Merge | None) -> None:
        self._route = route
        self._intake = intake
        self._record = record
        self._respond = respond
        self._merge = merge
        self._failure: DisaggError | Answer | None = None
        self._parts: list[Part] = []
        self._records: list[Record] = []
        self._joiner = Joiner(f"cmpl-{route.new_key()}", bodies.choices_per_prompt(intake.api, intake.body))

    async def run(self) -> None:
        """Serve the request to its end.

        Raises:
            DisaggError: If it cannot be served and the client has not been sent anything.
        """
        prompts = bodies.split_prompts(self._intake.body["prompt"])
        slots = asyncio.Semaphore(_AT_ONCE)
        self._respond.on_flow(self._on_flow)
        failed = False
        try:
            async with asyncio.TaskGroup() as group:
                for index, prompt in enumerate(prompts):
                    part = Part(self._begin, self._respond, self._joiner, index)
                    self._parts.append(part)
                    group.create_task(self._serve(part, prompt, slots))
        except* _PromptFailedError:
            failed = True
        self._sum_up()
        if failed:
            self._fail()
        else:
            self._end()

    async def _serve(self, part: Part, prompt: msgspec.Raw, slots: asyncio.Semaphore) -> None:
        async with slots:
            intake = self._intake
            record = Record(self._record.public_id, self._record.api, self._record.started_at)
            self._records.append(record)
            part.record = record
            own = msgspec.structs.replace(intake, body={**intake.body, "prompt": prompt})
            try:
                await Journey(self._route, own, record, part, merge=self._merge).run()
            except DisaggError as error:
                self._failure = self._failure or error
                raise _PromptFailedError from error
            if part.failure is not None:
                self._failure = self._failure or part.failure
                raise _PromptFailedError

    def _begin(self, part: Part, headers: Iterable[Header], data: bytes) -> None:
        """The first words of the first prompt that has any."""
        record = self._record
        self._sum_up()
        record.first_byte_at = part.record.first_byte_at
        record.status = 200
        own = {name for name, _ in record.headers()}
        kept = [header for header in headers if header[0] not in own]
        self._respond.start(200, [*record.headers(), *(kept or [SSE_TYPE])], first=data)

    def _on_flow(self, writable: bool) -> None:
        self._joiner.writable = writable
        for part in self._parts:
            if part.flow is not None:
                part.flow(writable)

    def _end(self) -> None:
        if self._respond.started:
            self._respond.finish(self._joiner.closing())
            return
        record = self._record
        wholes = [part.whole for part in self._parts]
        record.status = 200
        record.first_byte_at = max(r.first_byte_at for r in self._records)
        body = self._joiner.join(wholes)
        record.bytes_sent = len(body)
        own = {name for name, _ in record.headers()}
        kept = [header for header in self._parts[0].headers if header[0] not in own]
        self._respond.send(200, body, [*record.headers(), *kept])

    def _fail(self) -> None:
        """One error for all prompts: an engine's answer, or ours, or the end of a stream that has begun.

        Raises:
            DisaggError: If it is ours, and nothing has been sent.
        """
        failure, record = self._failure, self._record
        if self._respond.started:
            record.outcome = Outcome.BROKEN
            if isinstance(failure, Answer):
                self._respond.finish(b"data: " + failure.body + b"\n\n" + DONE)
            else:
                self._respond.finish(OPENAI.broken(failure or DisaggError("Internal server error")))
        elif isinstance(failure, Answer):
            record.status = failure.status
            record.bytes_sent = len(failure.body)
            own = {name for name, _ in record.headers()}
            kept = [header for header in failure.headers if header[0] not in own]
            self._respond.send(failure.status, failure.body, [*record.headers(), *kept])
        else:
            raise failure or DisaggError("Internal server error")

    def _sum_up(self) -> None:
        """What the prompts' stories say together: the least that holds for all of them."""
        record, parts = self._record, self._records
        odd = next((r for r in parts if r.path not in {Path.DISAGGREGATED, Path.NONE}), None)
        record.path = odd.path if odd is not None else Path.DISAGGREGATED
        record.reason = odd.reason if odd is not None else ""
        record.prefill = ",".join(sorted({r.prefill for r in parts if r.prefill}))
        record.decode = ",".join(sorted({r.decode for r in parts if r.decode}))
        record.primed = next((r.primed for r in parts if r.primed), "")
        record.retries = sum(r.retries for r in parts)
        record.prompt_tokens = sum(r.prompt_tokens for r in parts)
        record.cached_tokens = sum(r.cached_tokens for r in parts)
        record.completion_tokens = sum(r.completion_tokens for r in parts)
        record.bytes_sent = sum(r.bytes_sent for r in parts)
        record.prefill_s = max((r.prefill_s for r in parts), default=0.0)
        failed = next((r for r in parts if r.error), None)
        record.error = failed.error if failed is not None else ""
        record.detail = next((r.detail for r in parts if r.detail), "")


class Part:
    """Takes the answer to one prompt.

    Attributes:
        started: The client has been sent something of this prompt's answer.
        finished: This prompt's answer is complete.
        whole: An answer that is not streamed.
        headers: Its headers.
        failure: What the client is told instead.
        flow: Called when the client reads too slowly, or has caught up.
        record: The story of this prompt.
    """

    record: Record

    def __init__(
        self,
        begin: Callable[[Part, Iterable[Header], bytes], None],
        respond: Sink,
        joiner: Joiner,
        index: int,
    ) -> None:
        self.started = False
        self.finished = False
        self.whole = b""
        self.headers: tuple[Header, ...] = ()
        self.failure: Answer | None = None
        self.flow: Callable[[bool], None] | None = None
        self._begin = begin
        self._respond = respond
        self._joiner = joiner
        self._index = index

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Take a whole answer."""
        self.started = self.finished = True
        self.headers = tuple(headers)
        if status == 200:
            self.whole = body
        else:
            self.failure = Answer(status, body, self.headers)

    def start(
        self, status: int, headers: Iterable[Header] = (), *, length: int | None = None, first: bytes = b""
    ) -> None:
        """Take the first events of a stream."""
        del status, length  # a stream has status 200 and no length
        self.started = True
        self.headers = tuple(headers)
        self.write(first)

    def write(self, data: bytes) -> None:
        """Take further events."""
        for event in data.split(b"\n\n"):
            if not event or self.failure is not None:
                continue
            if event.startswith(_ERROR):
                # The journey ends by itself after it; until then nothing more is passed on.
                self.failure = Answer(500, event.removeprefix(b"data: "), self.headers)
                continue
            changed = self._joiner.event(event, self._index)
            if not changed:
                continue
            if self._respond.started:
                self._respond.write(changed)
            else:
                self._begin(self, self.headers, changed)

    def finish(self, last: bytes = b"") -> None:
        """Take the last events."""
        self.write(last)
        self.finished = True

    def framed_writer(self) -> Callable[[bytes], object] | None:
        """None: what is collected is not framed."""
        return None

    def on_flow(self, callback: Callable[[bool], None] | None) -> None:
        """Slow down with the client."""
        self.flow = callback
        if callback is not None and not self._joiner.writable:
            callback(False)


class Joiner:
    """Puts answers together: one id, choices numbered through, usage summed.

    Args:
        public_id: The answer's id.
        per_prompt: Choices of each prompt.

    Attributes:
        writable: The client can be sent more.
    """

    def __init__(self, public_id: str, per_prompt: int = 1) -> None:
        self.writable = True
        self._per_prompt = per_prompt
        self._id = msgspec.Raw(_encode(public_id))
        self._usage: dict[str, object] | None = None
        self._last: Fields = {}

    def event(self, event: bytes, index: int) -> bytes:
        """One event of prompt `index`, as the client gets it; empty if it is kept for the end."""
        data = event.removeprefix(b"data: ")
        if data.startswith(b"[DONE]"):
            return b""
        try:
            fields = _object.decode(data)
            choices = _choices.decode(fields["choices"])
            self._number(choices, index)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, ValueError):
            return event + b"\n\n"
        fields["id"] = self._id
        if not choices:
            self._last = fields
            self._count(fields)
            return b""
        fields["choices"] = msgspec.Raw(_encode(choices))
        return b"data: " + _encode(fields) + b"\n\n"

    def closing(self) -> bytes:
        """The end of a stream: its usage, if it was asked for, and the terminator."""
        if self._usage is None:
            return DONE
        fields = {**self._last, "usage": self._usage}
        return b"data: " + _encode(fields) + b"\n\n" + DONE

    def join(self, wholes: list[bytes]) -> bytes:
        """Whole answers as one, in the order of their prompts."""
        answers = [_object.decode(whole) for whole in wholes]
        choices: list[Fields] = []
        for index, answer in enumerate(answers):
            own = _choices.decode(answer["choices"])
            self._number(own, index)
            choices += own
            self._count(answer)
        joined: dict[str, object] = {**answers[0], "id": self._id, "choices": choices}
        if self._usage is not None:
            joined["usage"] = self._usage
        return _encode(joined)

    def _number(self, choices: list[Fields], prompt: int) -> None:
        """Number the choices of one prompt through."""
        first = prompt * self._per_prompt
        for choice in choices:
            own = int(bytes(choice["index"])) if self._per_prompt > 1 else 0
            choice["index"] = msgspec.Raw(_encode(first + own))

    def _count(self, fields: Fields) -> None:
        usage = msgspec.json.decode(fields.get("usage", b"null"))
        if isinstance(usage, dict):
            self._usage = usage if self._usage is None else _added(self._usage, usage)


def _added(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    """Two usages as one: numbers are added, objects too, and what one of them does not tell is the other's."""
    total = dict(first)
    for key, value in second.items():
        known = total.get(key)
        if known is None:
            total[key] = value
        elif isinstance(known, int) and isinstance(value, int):
            total[key] = known + value
        elif isinstance(known, dict) and isinstance(value, dict):
            total[key] = _added(known, value)
    return total
