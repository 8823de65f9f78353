"""The admin API: who is there, who is to leave, by which policy, how loud. On a port and with a key of its own."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import unquote

import msgspec
from pydantic import ValidationError

from disagg.errors import BadRequestError, ConfigError, MethodNotAllowedError, UnauthorizedError, UnknownPathError
from disagg.http.limits import ServerLimits
from disagg.http.messages import Answer, Request, json_answer
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.router.entrance import Entrance
from disagg.router.fleet import Member
from disagg.router.key_file import key_digest
from disagg.router.roster import Roster
from disagg.topology.fleet_file import Endpoint
from disagg.topology.secrets import masked
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router.admin")

_LIMITS = ServerLimits(max_body_bytes=64 * 1024)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that the admin API does.

    Attributes:
        method: HTTP method.
        path: Path; ``{name}`` stands for an instance's name.
        summary: What it does.
    """

    method: str
    path: str
    summary: str


OPERATIONS = (
    Operation(
        "GET", "/admin/instances", "List the instances with state, open requests and KV that decode may fetch."
    ),
    Operation("POST", "/admin/instances", "Take in an engine: {stage, url, name?, bootstrap_port?, ...}."),
    Operation("DELETE", "/admin/instances/{name}", "Drain an instance and forget it; with ?now=true at once."),
    Operation("POST", "/admin/instances/{name}/drain", "Give an instance no new requests; its process goes on."),
    Operation("POST", "/admin/instances/{name}/undrain", "Give a drained instance requests again."),
    Operation("PUT", "/admin/policy", "Choose a stage's instances by another policy: {stage, name}."),
    Operation("PUT", "/admin/log-level", "Say more or less: {level}."),
    Operation("GET", "/admin/config", "The router's settings as they are in force, secrets hidden."),
)
"""The whole API, for the document that describes it and for the answer to a wrong path."""


class _Policy(msgspec.Struct, forbid_unknown_fields=True):
    stage: Stage
    name: str


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"]


class _Stage(msgspec.Struct):
    stage: Stage


T = TypeVar("T")
Action = Callable[[Request, str], Answer]


class Admin:
    """Serves the admin API of one router.

    Args:
        router: What is administered.
        key: Digest of the key that every request needs.
        now: Monotonic seconds.
        roster: Engines that somebody else started; None where a launcher starts and stops the instances.
    """

    def __init__(self, router: Entrance, key: bytes, now: Callable[[], float], roster: Roster | None = None) -> None:
        self._router = router
        self._key = key
        self._now = now
        self._roster = roster
        self._server = Server(self._handle, _LIMITS)
        self._actions: dict[tuple[str, str], Action] = {
            ("GET", "/admin/instances"): self._list,
            ("POST", "/admin/instances"): self._add,
            ("DELETE", "/admin/instances/{name}"): self._remove,
            ("POST", "/admin/instances/{name}/drain"): self._drain,
            ("POST", "/admin/instances/{name}/undrain"): self._undrain,
            ("PUT", "/admin/policy"): self._set_policy,
            ("PUT", "/admin/log-level"): self._set_level,
            ("GET", "/admin/config"): self._config,
        }

    async def start(self, host: str, port: int) -> None:
        """Listen on `host` and `port`; 0 takes a free port, see `port`.

        Raises:
            PreparationError: If the address cannot be bound.
        """
        await self._server.start(host, port)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    async def stop(self) -> None:
        """Listen no more."""
        await self._server.stop()

    async def _handle(self, request: Request, respond: Responder) -> None:
        self._check_key(request)
        name, template = _instance_of(request.path)
        action = self._actions.get((request.method, template))
        if action is None:
            methods = [method for method, path in self._actions if path == template]
            if methods:
                raise MethodNotAllowedError(f"{request.path} takes {' and '.join(methods)}, not {request.method}.")
            raise UnknownPathError(f"There is no {request.path} here.", hint="GET /admin/instances is.")
        respond.send_answer(action(request, name))
        if request.method != "GET":
            log.warning("admin: %s %s", request.method, request.path)

    def _check_key(self, request: Request) -> None:
        scheme, _, key = (request.header(b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key_digest(key.strip()), self._key):
            raise UnauthorizedError(
                "The admin API needs its own key, not a client's.", hint="Send it as `Authorization: Bearer KEY`."
            )

    # Instances.

    def _list(self, request: Request, name: str) -> Answer:
        return json_answer(200, {"instances": [self._shown(m) for m in self._router.fleet.members()]})

    def _shown(self, member: Member) -> dict[str, object]:
        now_s = self._now()
        return {
            "name": member.name,
            "stage": member.stage,
            "url": member.url,
            "state": member.shown_state,
            "draining": member.parked,
            # Then stopping its process harms nobody.
            "drained": member.parked and self._router.settled(member) and member.idle(now_s),
            "in_flight": member.in_flight,
            "pinned_prompts": member.pinned,
            "leased_for_s": round(max(0.0, member.pinned_until_s - now_s), 3),
            "incarnation": member.incarnation,
        }

    def _add(self, request: Request, name: str) -> Answer:
        roster = self._changeable()
        stage = _decode(request, _Stage).stage
        try:
            fields = {k: v for k, v in msgspec.json.decode(request.body).items() if k != "stage"}
            endpoint = Endpoint.model_validate_json(msgspec.json.encode(fields), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ").rstrip(".")
            raise BadRequestError(f"{where}: {message}.", param=where) from error
        added = self._member(roster.add(stage, endpoint, endpoint.name))
        return json_answer(201, self._shown(added))

    def _remove(self, request: Request, name: str) -> Answer:
        roster, member = self._changeable(), self._member(name)
        if request.target.partition("?")[2] == "now=true":
            roster.remove(name)
            return json_answer(200, {"name": name, "state": "removed"})
        roster.retire(name, self._router.config.spec.request_timeout_s)
        return json_answer(202, self._shown(member))

    def _drain(self, request: Request, name: str) -> Answer:
        return self._park(name, parked=True)

    def _undrain(self, request: Request, name: str) -> Answer:
        return self._park(name, parked=False)

    def _park(self, name: str, *, parked: bool) -> Answer:
        member = self._member(name)
        if not parked and self._roster is not None:
            self._roster.keep(name)
        member.park(parked)
        return json_answer(200, self._shown(member))

    def _member(self, name: str) -> Member:
        member = self._router.fleet.get(name)
        if member is None:
            known = ", ".join(m.name for m in self._router.fleet.members())
            raise UnknownPathError(f"There is no instance {name}.", hint=f"There are: {known}.")
        return member

    def _changeable(self) -> Roster:
        if self._roster is None:
            raise BadRequestError(
                "This deployment starts its instances itself.",
                hint="They can be drained; disagg route takes others in.",
            )
        return self._roster

    # Settings.

    def _set_policy(self, request: Request, name: str) -> Answer:
        wanted = _decode(request, _Policy)
        try:
            self._router.set_policy(wanted.stage, wanted.name)
        except ConfigError as error:
            raise BadRequestError("; ".join(p.message for p in error.problems), param="name") from error
        return json_answer(200, {"stage": wanted.stage, "name": wanted.name})

    def _set_level(self, request: Request, name: str) -> Answer:
        level = _decode(request, _Level).level
        self._router.set_log_level(logging.getLevelNamesMapping()[level.upper()])
        return json_answer(200, {"level": level})

    def _config(self, request: Request, name: str) -> Answer:
        config = self._router.config
        settings = masked("router", config.spec.model_dump(mode="json"))
        return json_answer(
            200,
            {"served_model_names": config.served_model_names, "lease_s": config.lease_s, "router": settings},
        )


def _instance_of(path: str) -> tuple[str, str]:
    """The instance that a path names, and the path with ``{name}`` in its place."""
    parts = path.split("/")
    if parts[:3] != ["", "admin", "instances"] or len(parts) < 4 or not parts[3]:
        return "", path
    return unquote(parts[3]), "/".join([*parts[:3], "{name}", *parts[4:]])


def _decode(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"The body does not fit: {error}.") from error
