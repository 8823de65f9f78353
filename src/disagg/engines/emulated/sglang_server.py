"""The HTTP side of an engine that speaks SGLang's API."""

from __future__ import annotations

import msgspec

from disagg.engines.emulated.apis.models import model_list
from disagg.engines.emulated.apis.sglang import SglangApi
from disagg.engines.emulated.core import Core
from disagg.engines.emulated.server import Api
from disagg.engines.emulated.settings import Role
from disagg.errors import BadRequestError
from disagg.http.messages import JSON_TYPE, Request, json_answer
from disagg.http.responder import Responder

_APIS = {
    "/v1/chat/completions": SglangApi("chat"),
    "/v1/completions": SglangApi("completion"),
    "/generate": SglangApi("generate"),
}
_GET = ("/v1/models", "/health", "/health_generate", "/metrics", "/get_load", "/get_server_info", "/server_info")
_MODES = {Role.PRODUCER: "prefill", Role.CONSUMER: "decode", Role.BOTH: "null", Role.NONE: "null"}


class _Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class SglangServer(Api):
    """Answers HTTP requests for one engine."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._apis = _APIS
        self._posts = {"/abort_request", "/flush_cache"}
        self._gets = (*_GET, "/get_model_info")

    def _post(self, request: Request, responder: Responder) -> None:
        if request.path == "/flush_cache":
            self._core.engine.pool.forget()
            responder.send(200, b"Cache flushed.\n")
            return
        try:
            asked = msgspec.json.decode(request.body, type=_Abort)
        except msgspec.DecodeError as error:
            responder.send_answer(_APIS["/generate"].refused(BadRequestError(f"{error}")))
            return
        for exchange in tuple(self._core.exchanges):
            # As the real server: the beginning of an id is enough.
            if asked.abort_all or (asked.rid and exchange.begins_with(asked.rid)):
                exchange.end()
        responder.send(200, b"", (JSON_TYPE,))

    def _read(self, path: str, responder: Responder) -> None:
        core, settings = self._core, self._settings
        match path:
            case "/health_generate":
                responder.send(503 if core.dead else 200, b"")
            case "/get_load":
                engine = core.engine
                used = int(engine.pool.usage * settings.num_blocks) * settings.block_size
                load = {"dp_rank": 0, "num_reqs": len(core.exchanges), "num_waiting_reqs": engine.queued}
                responder.send_answer(json_answer(200, [{**load, "num_tokens": used}]))
            case "/get_server_info" | "/server_info":
                info = {
                    "model_path": settings.model,
                    "served_model_name": settings.served_model_names[0],
                    "disaggregation_mode": _MODES[settings.role],
                    "disaggregation_bootstrap_port": settings.default_bootstrap_port,
                    "max_total_num_tokens": settings.num_blocks * settings.block_size,
                    "context_length": settings.max_model_len,
                    "status": "ready",
                }
                responder.send_answer(json_answer(200, info))
            case "/get_model_info":
                info = {"model_path": settings.model, "tokenizer_path": settings.model, "is_generation": True}
                responder.send_answer(json_answer(200, info))
            case "/v1/models":
                cards = model_list(settings, int(core.created))["data"]
                kept = ("id", "object", "created", "root", "parent", "max_model_len")
                data = [{**{key: card[key] for key in kept}, "owned_by": "sglang"} for card in _dicts(cards)]
                responder.send_answer(json_answer(200, {"object": "list", "data": data}))
            case _:
                super()._read(path, responder)


def _dicts(cards: object) -> list[dict[str, object]]:
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
