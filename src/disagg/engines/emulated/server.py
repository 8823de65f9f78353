"""The HTTP side of an emulated engine: vLLM's endpoints, and a few of its own under `/emulated/` for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from uuid import uuid4
from zlib import crc32

import msgspec

from disagg.engines.emulated import metrics
from disagg.engines.emulated.answers import Identity
from disagg.engines.emulated.driver import Driver
from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.exchange import ENGINE_DEAD, REQUEST_FAILED, EngineFailedError, Exchange
from disagg.engines.emulated.faults import CutOutput, FaultBox, Faults, Output, read_faults
from disagg.engines.emulated.fields import UnreadableBodyError, read_object
from disagg.engines.emulated.handoff import FatalHandoffError, RemoteKv, read_remote
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.errors import BadRequestError, ClientError
from disagg.http.messages import JSON_TYPE, Request, json_answer
from disagg.http.responder import Responder

VERSION = "0.32.0"
"""The vLLM version whose behaviour this engine has."""
_POST = ("/v1/chat/completions", "/v1/completions")
_GET = ("/v1/models", "/health", "/version", "/metrics", "/load")
_ADMIN = "/emulated/"


@dataclass(slots=True)
class Core:
    """A running engine as its endpoints see it.

    Attributes:
        engine: The state.
        driver: What runs it.
        faults: What is to go wrong.
        die: Called when a request has brought the engine down.
        control: Carries out `freeze`, `thaw`, `crash` and `restart`.
        exchanges: Requests that are under way.
        dead: The engine is down and only the process is still there.
        created: When it started, in seconds since 1970.
    """

    engine: Engine
    driver: Driver
    faults: FaultBox
    die: Callable[[], None]
    control: Callable[[str], Awaitable[None]]
    exchanges: set[Exchange] = field(default_factory=set)
    dead: bool = False
    created: int = 0


class Api:
    """Answers HTTP requests for one engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.engine.settings
        shape = repr(replace(settings, engine_id="")).encode()
        self._fingerprint = f"vllm-{VERSION}-{crc32(shape):08x}"
        self._details = settings.prompt_tokens_details

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        path = request.path
        if path.startswith(_ADMIN):
            await self._admin(path.removeprefix(_ADMIN), request, responder)
            return
        if self._core.driver.frozen:
            await self._core.driver.thawed()
        method = request.method
        if path in _POST and method == "POST":
            await self._generate(request, responder)
        elif (path in _GET and method == "GET") or (path == "/ping" and method in {"GET", "POST"}):
            self._read(path, responder)
        elif path in _POST or path in _GET or path == "/ping":
            allowed = b"POST" if path in _POST else b"GET"
            body = msgspec.json.encode({"detail": "Method Not Allowed"})
            responder.send(405, body, (JSON_TYPE, (b"allow", allowed)))
        else:
            responder.send_answer(json_answer(404, {"detail": "Not Found"}))

    # Generation.

    async def _generate(self, request: Request, responder: Responder) -> None:
        core = self._core
        faults = core.faults.take()
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.status:
            error = {"message": REQUEST_FAILED, "type": "InternalServerError", "param": None, "code": faults.status}
            responder.send_answer(json_answer(faults.status, {"error": error}))
            return
        if core.dead:
            raise EngineFailedError(ENGINE_DEAD)
        chat = request.path == _POST[0]
        try:
            body = read_object(request.body, request.header(b"content-type"))
        except UnreadableBodyError as error:
            responder.send_answer(json_answer(400, {"detail": error.message}))
            return
        generation, remote = self._check(body, chat=chat)
        if faults.no_handle:
            generation.kv_params = None
        identity = self._identify(request, body, chat=chat)
        output = _output(responder, faults)
        exchange = Exchange(core.driver, generation, identity, remote, output)
        core.exchanges.add(exchange)
        responder.on_disconnect(exchange.cancel)
        try:
            exchange.run()
            await exchange.done
            if output is not responder:
                # A cut answer is never complete: this ends when the connection does.
                await asyncio.get_running_loop().create_future()
        finally:
            core.exchanges.discard(exchange)

    def _check(self, body: dict[str, object], *, chat: bool) -> tuple[Generation, RemoteKv | None]:
        """Check a request. One that is refused and names remote KV lets it go, as vLLM does since 0.32."""
        core = self._core
        engine = core.engine
        params = body.get("kv_transfer_params") if core.driver.puller is not None else None
        try:
            generation = read_generation(body, "chat" if chat else "completion", engine.settings, engine.tokenizer)
        except ClientError:
            if isinstance(params, dict) and params.get("remote_block_ids"):
                self._let_go(params)
            raise
        try:
            return generation, read_remote(params) if isinstance(params, dict) else None
        except FatalHandoffError as error:
            core.die()
            raise EngineFailedError(ENGINE_DEAD) from error

    def _let_go(self, params: dict[str, object]) -> None:
        try:
            remote = read_remote(params)
        except FatalHandoffError:
            return
        if remote is not None:
            self._core.driver.release(remote)

    def _identify(self, request: Request, body: dict[str, object], *, chat: bool) -> Identity:
        header = request.header(b"x-request-id")
        given = header.decode("latin-1") if header is not None else body.get("request_id") or uuid4().hex
        return Identity(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{given}",
            created=int(time.time()),
            model=self._core.engine.settings.served_model_names[0],
            fingerprint=self._fingerprint,
            details=self._details,
        )

    # Reading.

    def _read(self, path: str, responder: Responder) -> None:
        core = self._core
        match path:
            case "/health" | "/ping":
                responder.send(503 if core.dead else 200, b"")
            case "/load":
                responder.send_answer(json_answer(200, {"server_load": 0}))
            case "/version":
                responder.send_answer(json_answer(200, {"version": VERSION}))
            case "/metrics":
                responder.send(200, metrics.render(core.engine), (metrics.CONTENT_TYPE,))
            case _:
                responder.send_answer(json_answer(200, self._models()))

    def _models(self) -> dict[str, object]:
        settings, created = self._core.engine.settings, self._core.created
        permission = {
            "id": f"modelperm-{uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        data = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": settings.model,
                "parent": None,
                "max_model_len": settings.max_model_len,
                "permission": [permission],
            }
            for name in settings.served_model_names
        ]
        return {"object": "list", "data": data}

    # For tests.

    async def _admin(self, action: str, request: Request, responder: Responder) -> None:
        core = self._core
        match request.method, action:
            case "GET", "state":
                responder.send_answer(json_answer(200, self._state()))
            case "POST", "faults":
                core.faults.set(read_faults(request.body))
                core.driver.transfer_s = core.engine.settings.transfer_s + core.faults.current.transfer_s
                responder.send_answer(json_answer(200, core.faults.current))
            case "DELETE", "faults":
                core.faults.set(Faults())
                core.driver.transfer_s = core.engine.settings.transfer_s
                responder.send(200, b"{}", (JSON_TYPE,))
            case "POST", "freeze" | "thaw" | "crash" | "restart":
                responder.send(200, b"{}", (JSON_TYPE,))
                await core.control(action)
            case _:
                raise BadRequestError(
                    f"{request.method} {request.path} is not an action of the emulated engine.",
                    hint="There are GET state, POST and DELETE faults, POST freeze, thaw, crash and restart.",
                )

    def _state(self) -> dict[str, object]:
        core = self._core
        engine = core.engine
        return {
            "engine_id": engine.settings.engine_id,
            "role": engine.settings.role,
            "frozen": core.driver.frozen,
            "dead": core.dead,
            "blocks": engine.pool.num_blocks,
            "free_blocks": engine.pool.free_blocks,
            "leases": len(engine.leases),
            "expired_leases": engine.leases.expired,
            "late_reads": engine.leases.late,
            "running": len(engine.running),
            "waiting": engine.queued - len(engine.loading),
            "loading": len(engine.loading),
            "requests": len(core.exchanges),
        }


def _output(responder: Responder, faults: Faults) -> Output:
    """Where an answer goes under these faults."""
    if faults.close_at_byte is not None:
        return CutOutput(responder, faults.close_at_byte, close=True)
    if faults.hang_at_byte is not None:
        return CutOutput(responder, faults.hang_at_byte, close=False)
    return responder
