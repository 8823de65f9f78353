"""One request inside the server: its sequences, and the answer that is written as they produce tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import ClassVar

from disagg.engines.emulated.driver import Driver
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.handoff import RemoteKv
from disagg.engines.emulated.legs import legs_of
from disagg.engines.emulated.output import Output
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.sequence import Sequence
from disagg.errors import DisaggError
from disagg.http.messages import JSON_TYPE, SSE_TYPE, Header


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
        form: How the answer is written.
        remote: KV of each sequence that another engine holds; one that is named once is for all.
        output: Where the answer goes.
    """

    def __init__(
        self,
        driver: Driver,
        generation: Generation,
        identity: Identity,
        form: Form,
        remote: Items[RemoteKv],
        output: Output,
    ) -> None:
        self._driver = driver
        self._generation = generation
        self._output = output
        self._identity = identity
        self._opened = False
        self._left = 0
        self._form = form
        self.headers: tuple[Header, ...] = ()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sequences = self._make(remote)
        self._index = {seq: index for index, seq in enumerate(self.sequences)}

    def _make(self, remote: Items[RemoteKv]) -> list[Sequence]:
        generation = self._generation
        params = generation.kv_params or {}
        keep = bool(params.get("do_remote_decode")) and self._driver.puller is not None
        legs = legs_of(params, self._driver.engine.settings, keep=keep)
        many = len(generation.samplings) > 1
        out: list[Sequence] = []
        for number, prompt in enumerate(generation.prompts):
            base = f"{self._identity.internal}-{number}" if self._identity.numbered else self._identity.internal
            for choice, sampling in enumerate(generation.samplings):
                request_id = f"{base}-{os.urandom(4).hex()}"
                source = remote[len(out) % len(remote)] if remote else None
                if source is not None and source.key == "?":
                    source = replace(source, key=request_id)
                out.append(
                    Sequence(
                        request_id=f"{choice}_{request_id}" if many else request_id,
                        prompt=prompt,
                        sampling=sampling,
                        on_output=self._on_output,
                        streaming=generation.stream,
                        remote=source,
                        keep_for_decode=keep and not legs.concurrent,
                        offer_key=legs.key(request_id, len(out)),
                        forward=legs.forward,
                        tells_first_token=legs.first_token,
                        salt_key=generation.cache_salt,
                        adapter=generation.adapter,
                        adapter_name=None if generation.adapter is None else generation.model,
                        priority=generation.priority,
                    )
                )
        return out

    def run(self) -> None:
        """Start; `done` is set when the answer is complete."""
        self._left = len(self.sequences)
        if self._generation.stream:
            # The head goes out at once: what fails later is told inside the stream.
            self._output.start(200, (SSE_TYPE, *self.headers))
        for seq in self.sequences:
            if seq.offer_key is not None and self._driver.engine.settings.dialect == "sglang":
                self._driver.submit_when_asked(seq, seq.offer_key)
            else:
                self._driver.submit(seq)

    def cancel(self) -> None:
        """The client has left."""
        for seq in self.sequences:
            self._driver.abort(seq)
        self._close()

    def named(self, wanted: set[object]) -> bool:
        """Whether it is meant by one of these ids, with or without the suffix."""
        return any(seq.request_id in wanted or seq.request_id[:-9] in wanted for seq in self.sequences)

    def begins_with(self, name: str) -> bool:
        """Whether it is meant by the beginning of its id."""
        return self._identity.internal.startswith(name)

    def end(self) -> None:
        """Somebody else wants it ended: what there is so far is the answer, and it says that it was aborted."""
        if self.done.done():
            return
        for seq in self.sequences:
            self._driver.abort(seq)
            self._on_output(seq)

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
        if self._generation.stream:
            form = self._form
            opening = b"" if self._opened else form.opening(self.sequences)
            self._opened = True
            self._output.write(opening + form.delta(self._index[seq], seq))
        if seq.finish_reason is not None:
            self._left -= 1
            if self._left == 0:
                self._complete()

    def _complete(self) -> None:
        if self._generation.stream:
            self._output.finish(self._form.closing(self.sequences))
        else:
            self._output.send(200, self._form.full(self.sequences), (JSON_TYPE, *self.headers))
        self._close()

    def _fail(self, error: DisaggError) -> None:
        for seq in self.sequences:
            self._driver.abort(seq)
        if self._generation.stream:
            self._output.finish(self._form.failed(error))
        else:
            answer = self._form.refused(error)
            self._output.send(answer.status, answer.body, (*answer.headers, *self.headers))
        self._close()

    def _close(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
