"""The HTTP side of an emulated engine: vLLM's endpoints, and a few of its own under `/emulated/` for tests."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec

from disagg.engines.emulated import admin, metrics
from disagg.engines.emulated.apis import pooling, utility
from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.apis.messages import Messages, count_tokens
from disagg.engines.emulated.apis.models import model_list
from disagg.engines.emulated.apis.openai import Chat, Completions
from disagg.engines.emulated.apis.responses import Responses, UnknownResponseError
from disagg.engines.emulated.apis.tokens import Generate
from disagg.engines.emulated.cache_events import EventsConfig
from disagg.engines.emulated.core import Core
from disagg.engines.emulated.exchange import ENGINE_DEAD, REQUEST_FAILED, EngineFailedError, Exchange
from disagg.engines.emulated.faults import Faults
from disagg.engines.emulated.fields import UnreadableBodyError, read_object
from disagg.engines.emulated.form import Identity
from disagg.engines.emulated.handoff import FatalHandoffError, RemoteKv
from disagg.engines.emulated.legs import remotes_of
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.output import FaultyOutput
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import ClientError, DisaggError
from disagg.http.messages import JSON_TYPE, Header, Request, error_object, json_answer
from disagg.http.responder import Responder

VERSION = "0.32.0"
"""The vLLM version whose behaviour this engine has."""
_GENERATE = "/inference/v1/generate"
_ABORT = "/inference/v1/abort_requests"
APIS: Mapping[str, GeneratingApi] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    _GENERATE: Generate(),
}
"""The endpoints that generate."""
_RENDERS = {f"{path}/render": api for path, api in APIS.items() if path != _GENERATE}
_Plain = Callable[[Mapping[str, Any], EngineSettings, Tokenizer], dict[str, Any]]
_PLAIN: Mapping[str, _Plain] = {
    "/tokenize": utility.tokenize,
    "/detokenize": utility.detokenize,
    "/v1/messages/count_tokens": count_tokens,
}
_GET = ("/v1/models", "/health", "/version", "/metrics", "/load", "/kv_event_sources", "/ping")
# As on the real server, what is asked all the time is not counted.
_UNCOUNTED = frozenset({"/health", "/ping", "/metrics", "/load", "/version"})
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
_SCALE_OUT_OFF = {
    "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
    "type": "PermissionDeniedError",
    "param": None,
    "code": 403,
}


class Api:
    """Answers HTTP requests for one engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._admin = admin.Admin(core)
        self._served: Counter[tuple[str, str, int]] = Counter()
        settings = self._settings = core.engine.settings
        shape = repr(replace(settings, engine_id="", kv_events=EventsConfig())).encode()
        self._fingerprint = f"vllm-{VERSION}-{crc32(shape):08x}"
        self._keys = [f"Bearer {key}".encode() for key in settings.api_keys]
        self._gets: tuple[str, ...] = _GET
        generates = settings.runner == "generate"
        self._apis: Mapping[str, GeneratingApi] = APIS if generates else {}
        self._posts = {*_PLAIN, *_RENDERS, _ABORT, "/ping"} if generates else {"/tokenize", "/detokenize", "/ping"}
        if not generates:
            self._posts |= pooling.PATHS

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        path, core = request.path, self._core
        if path.startswith(admin.PREFIX):
            await self._admin.handle(request, responder)
            return
        if core.silent:
            await core.driver.thawed()
        try:
            await self._route(request, responder)
        finally:
            if path not in _UNCOUNTED:
                name = path if path in self._apis or path in self._posts or path in self._gets else "none"
                self._served[name, request.method, responder.status // 100] += 1

    async def _route(self, request: Request, responder: Responder) -> None:
        path = request.path
        if self._keys and path.startswith(_GUARDED) and not self._allowed(request):
            responder.send_answer(json_answer(401, {"error": "Unauthorized"}))
            return
        api = self._apis.get(path)
        if api is not None and request.method == "POST":
            await self._generate(api, request, responder)
        elif path in self._posts and request.method == "POST":
            self._post(request, responder)
        elif path in self._gets and request.method == "GET":
            self._read(path, responder)
        elif api is not None or path in self._posts or path in self._gets:
            allowed = b"GET" if path in self._gets else b"POST"
            body = msgspec.json.encode({"detail": "Method Not Allowed"})
            responder.send(405, body, (JSON_TYPE, (b"allow", allowed)))
        elif path.startswith("/v1/responses/") and "/v1/responses" in self._apis:
            name = path.split("/")[3]
            error = UnknownResponseError(f"Response with id '{name}' not found.", param="response_id")
            responder.send_answer(json_answer(404, error_object(error)))
        else:
            responder.send_answer(json_answer(404, {"detail": "Not Found"}))

    def _allowed(self, request: Request) -> bool:
        given = request.header(b"authorization") or b""
        scheme, _, key = given.partition(b" ")
        whole = b"Bearer " + key if scheme.lower() == b"bearer" else b""
        return any(hmac.compare_digest(whole, known) for known in self._keys)

    # Generation.

    async def _generate(self, api: GeneratingApi, request: Request, responder: Responder) -> None:
        core = self._core
        faults = core.faults.take(request)
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.silent:
            await asyncio.get_running_loop().create_future()
        if faults.status:
            _refuse(faults, responder)
            return
        if api.prefix == Generate.prefix and not self._settings.scale_out:
            responder.send_answer(json_answer(403, {"error": _SCALE_OUT_OFF}))
            return
        try:
            if core.dead:
                raise EngineFailedError(ENGINE_DEAD)
            body = read_object(request.body, request.header(b"content-type"))
            header = request.header(b"x-request-id")
            given = header.decode("latin-1") if header is not None else None
            generation, remote = self._check(api, body, given)
        except UnreadableBodyError as error:
            responder.send_answer(json_answer(400, {"detail": error.message}))
            return
        except DisaggError as error:
            answer = api.refused(error)
            responder.send(answer.status, answer.body, (*answer.headers, *self._echoed(request)))
            return
        await self._run(api, request, body, (generation, remote), (responder, faults))

    async def _run(
        self,
        api: GeneratingApi,
        request: Request,
        body: Mapping[str, Any],
        work: tuple[Generation, list[RemoteKv]],
        to: tuple[Responder, Faults],
    ) -> None:
        """Run a request that was accepted, and answer it."""
        core = self._core
        (generation, remote), (responder, faults) = work, to
        if faults.no_handle:
            generation.kv_params = None
        header = request.header(b"x-request-id")
        given = header.decode("latin-1") if header is not None else None
        details = self._settings.prompt_tokens_details
        identity = api.identify(given, body, generation.model, self._fingerprint, details=details)
        faulty = FaultyOutput(responder, faults) if faults.rewrites else None
        form = api.form(generation, identity, body, core.engine.tokenizer)
        exchange = Exchange(core.driver, generation, identity, form, remote, faulty or responder)
        exchange.headers = self._echoed(request)
        core.exchanges.add(exchange)
        responder.on_disconnect(exchange.cancel)
        try:
            exchange.run()
            if faulty is not None:
                await faulty.pump()
            await exchange.done
        finally:
            core.exchanges.discard(exchange)

    def _echoed(self, request: Request) -> tuple[Header, ...]:
        if not self._settings.request_id_headers:
            return ()
        given = request.header(b"x-request-id")
        return () if given is None else ((b"x-request-id", given),)

    def _check(
        self, api: GeneratingApi, body: dict[str, Any], given: str | None
    ) -> tuple[Generation, list[RemoteKv]]:
        """Check a request. One that is refused and names remote KV lets it go, as vLLM does since 0.32."""
        core = self._core
        params = self._params(body) if core.driver.puller is not None else None
        try:
            generation = api.read(body, self._settings, core.engine.tokenizer)
        except ClientError:
            if isinstance(params, dict) and api.prefix != Generate.prefix:
                self._let_go(params, api.identify(given, body, "", "", details=False))
            raise
        try:
            return generation, remotes_of(params, self._settings) if isinstance(params, dict) else []
        except FatalHandoffError as error:
            core.die()
            raise EngineFailedError(ENGINE_DEAD) from error

    def _params(self, body: Mapping[str, Any]) -> object:
        """The fields of a request that tie its legs together."""
        if self._settings.dialect == "sglang":
            return body if body.get("bootstrap_room") is not None else None
        return body.get("kv_transfer_params")

    def _let_go(self, params: dict[str, object], identity: Identity) -> None:
        """A request that ties legs together is refused: who holds KV for it is told, as the real engine does."""
        if self._settings.dialect == "nixl-push":
            return  # its writer waits for the whole time of a registration
        try:
            remotes = remotes_of(params, self._settings)
        except FatalHandoffError:
            return
        name = f"{identity.internal}-0" if identity.numbered else identity.internal
        for remote in remotes:
            self._core.driver.release(replace(remote, key=name) if remote.key == "?" else remote)

    # What generates nothing.

    def _post(self, request: Request, responder: Responder) -> None:
        path, settings, tokenizer = request.path, self._settings, self._core.engine.tokenizer
        if path == "/ping":
            self._read(path, responder)
            return
        if (path in _RENDERS or path == _ABORT) and not settings.scale_out:
            responder.send_answer(json_answer(403, {"error": _SCALE_OUT_OFF}))
            return
        if path == _ABORT:
            self._abort(request, responder)
            return
        api = _RENDERS.get(path) or APIS["/v1/messages" if path.startswith("/v1/messages") else "/v1/completions"]
        try:
            body = read_object(request.body, request.header(b"content-type"))
            if path in _PLAIN:
                out: object = _PLAIN[path](body, settings, tokenizer)
            elif path in pooling.PATHS:
                out = pooling.pool(path, body, settings, tokenizer)
            else:
                header = request.header(b"x-request-id")
                given = header.decode("latin-1") if header is not None else None
                out = utility.render(api, given, body, settings, tokenizer)
        except UnreadableBodyError as error:
            responder.send_answer(json_answer(400, {"detail": error.message}))
        except ClientError as error:
            responder.send_answer(api.refused(error))
        else:
            responder.send_answer(json_answer(200, out))

    def _abort(self, request: Request, responder: Responder) -> None:
        """End requests by the engine's own ids, or the part of them before the suffix."""
        problem = None
        names: object = None
        try:
            body = json.loads(request.body)
            names = body.get("request_ids") if isinstance(body, dict) else None
            problem = "Missing 'request_ids' in request body" if names is None else None
        except ValueError as wrong:
            problem = f"JSON decode error: {wrong}"
        if problem is not None:
            error = {"message": problem, "type": "Bad Request", "param": None, "code": 400}
            responder.send_answer(json_answer(400, {"error": error}))
            return
        wanted = set(names) if isinstance(names, list) else {names}
        for exchange in tuple(self._core.exchanges):
            if exchange.named(wanted):
                exchange.end()
        responder.send(200, b"")

    def _read(self, path: str, responder: Responder) -> None:
        core = self._core
        match path:
            case "/health" | "/ping":
                responder.send(503 if core.dead else 200, b"")
            case "/load":
                load = len(core.exchanges) if self._settings.load_tracking else 0
                responder.send_answer(json_answer(200, {"server_load": load}))
            case "/version":
                responder.send_answer(json_answer(200, {"version": VERSION}))
            case "/kv_event_sources":
                publisher = core.driver.publisher
                responder.send_answer(json_answer(200, {} if publisher is None else publisher.sources()))
            case "/metrics":
                responder.send(200, metrics.render(core.engine, core.created, self._served), (metrics.CONTENT_TYPE,))
            case _:
                responder.send_answer(json_answer(200, model_list(self._settings, int(core.created))))


def _refuse(faults: Faults, responder: Responder) -> None:
    headers: tuple[Header, ...] = (JSON_TYPE,)
    if faults.content_type:
        headers = ((b"content-type", faults.content_type.encode()),)
    if faults.retry_after_s:
        headers = (*headers, (b"retry-after", b"%d" % faults.retry_after_s))
    error = {"message": REQUEST_FAILED, "type": "InternalServerError", "param": None, "code": faults.status}
    body = msgspec.json.encode({"error": error}) if faults.body is None else faults.body.encode()
    responder.send(faults.status, body, headers)
