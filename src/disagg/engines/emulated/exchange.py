"""One request inside the server: its sequences, and the answer that is written as they produce tokens."""

from __future__ import annotations

import asyncio
from typing import ClassVar
from uuid import uuid4

from disagg.engines.emulated.answers import Identity, Stream, error_event, full
from disagg.engines.emulated.driver import Driver
from disagg.engines.emulated.faults import Output
from disagg.engines.emulated.handoff import RemoteKv
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.sequence import Sequence
from disagg.errors import DisaggError
from disagg.http.messages import JSON_TYPE, SSE_TYPE, error_object, json_answer


class EngineFailedError(DisaggError):
    """A request failed inside the engine; the cause is in the engine's log only."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "InternalServerError"


REQUEST_FAILED = "Internal server error"
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Exchange:
    """Runs one request and answers it.

    Args:
        driver: The engine that runs it.
        generation: What to generate.
        identity: What the answer repeats.
        remote: KV of the prompt that another engine holds.
        output: Where the answer goes.
    """

    def __init__(
        self, driver: Driver, generation: Generation, identity: Identity, remote: RemoteKv | None, output: Output
    ) -> None:
        self._driver = driver
        self._generation = generation
        self._output = output
        self._identity = identity
        self._opened = False
        self._left = 0
        tokenizer = driver.engine.tokenizer
        self._stream = Stream(generation, identity, tokenizer) if generation.stream else None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sequences = self._make(remote)
        self._index = {seq: index for index, seq in enumerate(self.sequences)}

    def _make(self, remote: RemoteKv | None) -> list[Sequence]:
        generation = self._generation
        params = generation.kv_params or {}
        keep = bool(params.get("do_remote_decode")) and self._driver.puller is not None
        many = len(generation.samplings) > 1
        out = []
        for number, prompt in enumerate(generation.prompts):
            base = self._identity.id if generation.chat else f"{self._identity.id}-{number}"
            for choice, sampling in enumerate(generation.samplings):
                request_id = f"{base}-{uuid4().hex[:8]}"
                out.append(
                    Sequence(
                        request_id=f"{choice}_{request_id}" if many else request_id,
                        prompt=prompt,
                        sampling=sampling,
                        on_output=self._on_output,
                        streaming=generation.stream,
                        remote=remote,
                        keep_for_decode=keep,
                        salt_key=generation.cache_salt,
                    )
                )
        return out

    def run(self) -> None:
        """Start; `done` is set when the answer is complete."""
        self._left = len(self.sequences)
        if self._stream is not None:
            # The head goes out at once: what fails later is told inside the stream.
            self._output.start(200, (SSE_TYPE,))
        for seq in self.sequences:
            self._driver.submit(seq)

    def cancel(self) -> None:
        """The client has left."""
        for seq in self.sequences:
            self._driver.abort(seq)
        self._close()

    def fail(self, message: str) -> None:
        """Fail with this message, unless it is over."""
        if not self.done.done():
            self._fail(EngineFailedError(message))

    def _on_output(self, seq: Sequence) -> None:
        if self.done.done():
            return
        if seq.finish_reason == "error":
            self._fail(EngineFailedError(REQUEST_FAILED))
            return
        stream = self._stream
        if stream is not None:
            opening = b"" if self._opened else stream.opening(self.sequences)
            self._opened = True
            self._output.write(opening + stream.delta(self._index[seq], seq))
        if seq.finish_reason is not None:
            self._left -= 1
            if self._left == 0:
                self._complete()

    def _complete(self) -> None:
        if self._stream is not None:
            self._output.finish(self._stream.closing(self.sequences))
        else:
            tokenizer = self._driver.engine.tokenizer
            self._output.send(200, full(self._generation, self._identity, self.sequences, tokenizer), (JSON_TYPE,))
        self._close()

    def _fail(self, error: DisaggError) -> None:
        for seq in self.sequences:
            self._driver.abort(seq)
        if self._stream is not None:
            self._output.finish(error_event(error))
        else:
            answer = json_answer(error.status, error_object(error))
            self._output.send(answer.status, answer.body, answer.headers)
        self._close()

    def _close(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
