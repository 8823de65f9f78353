"""Endpoints under `/emulated/`, which no real engine has: for tests that look into an engine and break it."""

from __future__ import annotations

import msgspec

from disagg.engines.emulated.core import Core
from disagg.engines.emulated.faults import read_faults
from disagg.errors import BadRequestError
from disagg.http.messages import JSON_TYPE, Request, json_answer
from disagg.http.responder import Responder

PREFIX = "/emulated/"
ACTIONS = ("freeze", "freeze-core", "thaw", "crash", "restart", "refuse", "kill-core")
"""`freeze` stops the whole process and `freeze-core` the engine behind a healthy door; `refuse` closes the port;
`crash` is a sudden end, `kill-core` one of the engine alone, which the door tells before it ends too."""


class _Duration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long an action lasts, in seconds; 0 is for good."""

    for_s: float = 0.0


class Admin:
    """Answers these endpoints."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request.

        Raises:
            BadRequestError: If there is no such action, or its body is wrong.
        """
        core, action = self._core, request.path.removeprefix(PREFIX)
        match request.method, action:
            case "GET", "state":
                responder.send_answer(json_answer(200, self._state()))
            case "GET", "faults":
                responder.send_answer(json_answer(200, core.faults.current))
            case "POST", "faults":
                core.faults.set(read_faults(request.body))
                responder.send_answer(json_answer(200, core.faults.current))
            case "DELETE", "faults":
                core.faults.set(())
                responder.send(200, b"{}", (JSON_TYPE,))
            case "POST", "clear-cache":
                core.engine.pool.forget()
                core.driver.publish()
                responder.send(200, b"{}", (JSON_TYPE,))
            case "POST", str() if action in ACTIONS:
                duration = _duration(request.body)
                responder.send(200, b"{}", (JSON_TYPE,))
                await core.control(action, duration)
            case _:
                raise BadRequestError(
                    f"{request.method} {request.path} is not an action of the emulated engine.",
                    hint="There are GET state and faults, POST and DELETE faults, POST clear-cache, "
                    f"{', '.join(ACTIONS)}.",
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
            "leases": len(engine.leases) + len(engine.meetings),
            "expired_leases": engine.leases.expired + engine.meetings.expired,
            "late_reads": engine.leases.late,
            "running": len(engine.running),
            "waiting": engine.queued - len(engine.loading),
            "loading": len(engine.loading),
            "requests": len(core.exchanges),
        }


def _duration(body: bytes) -> float:
    if not body:
        return 0.0
    try:
        seconds = msgspec.json.decode(body, type=_Duration).for_s
    except msgspec.DecodeError as error:
        raise BadRequestError(f"Not a duration: {error}.", hint='Send nothing, or {"for_s": 2}.') from error
    if not 0 <= seconds < float("inf"):
        raise BadRequestError(f"for_s must not be negative, got {seconds}.")
    return seconds
