"""An engine that does what a test tells it, and remembers what it was asked. It holds no KV and knows no model."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from disagg.engines.base import Api, Body, Call, Dialect, Handle, Order, Transfer
from disagg.engines.bodies import holds_several
from disagg.errors import HandoffError
from disagg.http.messages import JSON_TYPE, SSE_TYPE, Request
from disagg.http.responder import Responder
from disagg.http.server import Server

NULL = msgspec.Raw(b"null")
RELEASE, ABORT = "/release", "/abort"

Behaviour = Callable[["MockEngine", Request, Responder], Awaitable[None]]


class MockEngine:
    """A server whose next answers are scripted; without a script it answers as its stage does.

    Attributes:
        seen: Every request that arrived.
        bodies: Their bodies as JSON.
        told: Releases and aborts that arrived.
        told_status: What they are answered with.
        departures: Requests whose peer left before the answer was complete.
        pages: Behaviours of paths that are not a leg of a request, and are not remembered.
        adapters: LoRA adapters that it lists.
        listings: How often it was asked for its models.
        script: Behaviours of the next requests, in order.
        default: Behaviour when the script is empty.
    """

    def __init__(self, default: Behaviour, engine_id: str = "engine") -> None:
        self.engine_id = engine_id
        self.default = default
        self.script: deque[Behaviour] = deque()
        self.seen: list[Request] = []
        self.told: list[tuple[str, Any]] = []
        self.told_status = 200
        self.pages: dict[str, Behaviour] = {}
        self.departures = 0
        self.max_model_len = 2048
        self.adapters: list[str] = []
        self.listings = 0
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self._server = Server(self._handle)

    async def start(self, port: int = 0) -> None:
        await self._server.start("127.0.0.1", port)

    async def stop(self) -> None:
        await self._server.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def open_requests(self) -> int:
        return self._server.active

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(r.body) for r in self.seen if r.body]

    def reset_connections(self) -> None:
        """Break every connection, as a killed process does."""
        for connection in tuple(self._server.connections):
            connection.transport.abort()

    async def _handle(self, request: Request, respond: Responder) -> None:
        if request.path == "/v1/models":
            self.listings += 1
            cards = [{"id": "x", "max_model_len": self.max_model_len, "parent": None}]
            cards += [{"id": name, "max_model_len": None, "parent": "x", "root": "y"} for name in self.adapters]
            respond.send(200, json.dumps({"data": cards}).encode())
            return
        if request.path in {RELEASE, ABORT}:
            self.told.append((request.path, json.loads(request.body)))
            respond.send(self.told_status, b"{}", (JSON_TYPE,))
            return
        if request.path in self.pages:
            await self.pages[request.path](self, request, respond)
            return
        self.seen.append(request)
        self.arrived.set()

        def departed() -> None:
            self.departures += 1
            self.left.set()

        respond.on_disconnect(departed)
        behaviour = self.script.popleft() if self.script else self.default
        await behaviour(self, request, respond)


# Behaviours.


async def prefilled(engine: MockEngine, request: Request, respond: Responder) -> None:
    """A prefill leg that worked: one token and a handle."""
    respond.send(200, prefill_answer(engine.engine_id), (JSON_TYPE,))


def prefill_answer(engine_id: str) -> bytes:
    return json.dumps(
        {"usage": {"prompt_tokens": 7}, "kv_transfer_params": {"engine": engine_id, "blocks": [1, 2], "odd": 1.50}}
    ).encode()


WHOLE = b'{"id":"cmpl-1","choices":[{"text":"hi"}],"kv_transfer_params":null,"usage":{"total_tokens":9}}'
EVENTS = (b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n")


async def decoded(engine: MockEngine, request: Request, respond: Responder) -> None:
    """A leg that answers as it was asked, streamed or whole."""
    if json.loads(request.body).get("stream"):
        await streamed()(engine, request, respond)
    else:
        respond.send(200, WHOLE, (JSON_TYPE,))


def streamed(events: Sequence[bytes] = EVENTS, *, pause_s: float = 0.0, end: str = "finish") -> Behaviour:
    """Send events; then `finish`, `abort` (break the connection) or `hang`."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        respond.start(200, (SSE_TYPE,))
        for event in events:
            respond.write(event)
            await asyncio.sleep(pause_s)
        if end == "hang":
            await asyncio.sleep(3600)
        elif end == "abort":
            # The bytes before it have to leave first.
            await asyncio.sleep(0.02)
            respond.abort()
        else:
            respond.finish()

    return behave


def gated(gate: asyncio.Event, before: Sequence[bytes], after: Sequence[bytes]) -> Behaviour:
    """Send some events, wait for the test, send the others."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        respond.start(200, (SSE_TYPE,), first=b"".join(before))
        await gate.wait()
        for event in after:
            respond.write(event)
        respond.finish()

    return behave


def answers(status: int, body: bytes, content_type: bytes = b"application/json") -> Behaviour:
    """Answer with this."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        respond.send(status, body, ((b"content-type", content_type),))

    return behave


def error(status: int, message: str = "engine says no", kind: str = "SomeError") -> Behaviour:
    """Answer with an error in the usual shape."""
    return answers(status, error_json(status, message, kind))


def error_json(status: int, message: str = "engine says no", kind: str = "SomeError") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


async def hangs(engine: MockEngine, request: Request, respond: Responder) -> None:
    """Take the request and never answer."""
    await asyncio.sleep(3600)


async def breaks(engine: MockEngine, request: Request, respond: Responder) -> None:
    """Break the connection without an answer."""
    respond.abort()


def half_whole(engine_sends: bytes = b'{"id":') -> Behaviour:
    """Break the connection inside an answer that is not streamed."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        respond.start(200, (JSON_TYPE,), length=1000, first=engine_sends)
        await asyncio.sleep(0.02)
        respond.abort()

    return behave


# A dialect without any engine behind it.


class _Params(msgspec.Struct):
    engine: str


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


class FakeDialect(Dialect):
    """Serial legs; the handle is what the mock prefill returns."""

    name = "fake"
    internal_keys = frozenset({"kv_transfer_params", "bootstrap_room", "request_id"})

    def local_reason(self, api: Api, body: Body) -> str | None:
        if bytes(body.get("n", b"1")) != b"1":
            return "n-greater-1"
        return "prompt-list" if api is Api.COMPLETIONS and holds_several(body.get("prompt", NULL)) else None

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        leg = {k: v for k, v in body.items() if k != "stream"}
        leg |= {"max_tokens": msgspec.Raw(b"1"), "kv_transfer_params": msgspec.Raw(b'{"keep":true}')}
        return msgspec.json.encode(leg)

    def read_handle(self, answer: bytes) -> Handle:
        try:
            params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
            engine = msgspec.json.decode(params, type=_Params).engine
        except msgspec.DecodeError as problem:
            raise HandoffError(f"no handle: {problem}") from problem
        return Handle(params.copy(), engine, 7, None)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        leg = dict(body)
        if handle is not None:
            leg["kv_transfer_params"] = handle.params
        return msgspec.json.encode(leg)

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        if handle is None:
            return None
        return Call(RELEASE, msgspec.json.encode({"release": handle.params}))


class IdsDialect(FakeDialect):
    """The same, of an engine that takes and tells token ids."""

    takes_prompt_ids = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        return None


class PrimingDialect(FakeDialect):
    """The same, of an engine that keeps what it was handed in its prefix cache."""

    primes = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        return "prompt-list" if api is Api.COMPLETIONS and holds_several(body.get("prompt", NULL)) else None

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        return msgspec.json.encode({**msgspec.json.decode(super().prefill_body(api, body, transfer)), "n": 1})


class PairedDialect(Dialect):
    """Both legs at once, tied by a key; what prefill answers is only looked at, and released through decode."""

    name = "fake-paired"
    internal_keys = frozenset({"tie"})
    order = Order.CONCURRENT
    pairs_first = True

    def local_reason(self, api: Api, body: Body) -> str | None:
        return None

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        return self._tied(body, transfer, "prefill")

    def read_handle(self, answer: bytes) -> Handle:
        if b"usage" not in answer:
            raise HandoffError("prefill kept nothing.")
        return Handle(msgspec.Raw(b"null"), "", 7, None)

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        return self._tied(body, transfer, "decode") if transfer is not None else msgspec.json.encode(body)

    def abort(self, transfer: Transfer) -> Call | None:
        return Call(ABORT, msgspec.json.encode({"abort": transfer.key}))

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        return Call(RELEASE, msgspec.json.encode({"release": transfer.key}))

    def _tied(self, body: Body, transfer: Transfer, stage: str) -> bytes:
        tie = {"key": transfer.key, "stage": stage, "prefill": transfer.prefill.engine_id}
        return msgspec.json.encode({**body, "tie": tie})
