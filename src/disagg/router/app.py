"""The router: its paths, its limits, and its life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from disagg.engines import bodies
from disagg.engines.base import Body, Dialect
from disagg.errors import (
    DisaggError,
    UnknownModelError,
    UpstreamUnreachableError,
)
from disagg.http.client import Client
from disagg.http.descriptors import raise_descriptor_limit
from disagg.http.limits import ClientLimits, ServerLimits
from disagg.http.messages import Answer, Request, error_answer
from disagg.http.origin import Origin
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.http.tls import server_tls
from disagg.policy.breaker import BreakerRules
from disagg.policy.registry import make_policy
from disagg.router.admission import Admission
from disagg.router.apis import Endpoint, find
from disagg.router.breaker import Breakers
from disagg.router.budget import RetryBudget
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fanout import Fanout, is_fanned_out
from disagg.router.fleet import Fleet, Member
from disagg.router.framing import error_reply
from disagg.router.gauges import connection_gauges
from disagg.router.intake import Credentials, Intake, check_length, model_of, priority_of, public_id, read_intake
from disagg.router.introduction import Introductions
from disagg.router.journey import Journey
from disagg.router.keys import client_keys, engine_credentials
from disagg.router.legs import Books, Legs
from disagg.router.live import policy_field, with_live_changes
from disagg.router.merge import merge_for
from disagg.router.models import Models
from disagg.router.observer import Observer
from disagg.router.pages import Pages
from disagg.router.passing import Passing, read_passed
from disagg.router.prefix_caches import PrefixCaches
from disagg.router.random_ids import RandomIds
from disagg.router.record import Outcome, Record, error_slug
from disagg.router.release import Releases
from disagg.router.route import Route
from disagg.router.spans import RequestSpan
from disagg.router.steering import Steering
from disagg.router.whole import Whole
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router")

Serve = Callable[[Record, Responder], Awaitable[None]]


class Router:
    """One endpoint in front of the fleet. A change of the fleet needs no restart.

    Args:
        config: Names, limits, modes.
        dialect: How legs are written for the engines of this deployment.
        fleet: Who is there; the launcher keeps it up to date.
        clocks: Where time and ids come from.
        tick_s: How late a time limit may be noticed, in seconds.

    Attributes:
        whole: What the pages show instead of this router's own numbers, if it is one of several on the port.
    """

    def __init__(
        self,
        config: RouterConfig,
        dialect: Dialect,
        fleet: Fleet,
        clocks: Clocks | None = None,
        *,
        tick_s: float = 0.1,
    ) -> None:
        spec = config.spec
        self.config = config
        self.fleet = fleet
        self._clocks = clocks or Clocks()
        self._observer = Observer(config, fleet, self._clocks)
        self.metrics = self._observer.metrics
        self.client = Client(ClientLimits(connect_timeout_s=spec.connect_timeout_s, tick_s=tick_s))
        self.server = Server(
            self._handle, ServerLimits(max_body_bytes=spec.max_body_bytes, tick_s=tick_s), self._refused_unread
        )
        for gauge in connection_gauges(self.server, self.client):
            self.metrics.add(gauge)
        self.whole: Whole | None = None
        self._dialect = dialect
        rules = BreakerRules(spec.breaker_failures, spec.breaker_open_s, spec.breaker_max_open_s)
        self._budget = RetryBudget(spec.retry_budget)
        breakers = Breakers(rules, fleet, self.metrics)
        books = Books(self.metrics, breakers, self._budget, self._clocks.monotonic, self._observer.tracer)
        self.engine_headers = engine_credentials(spec)
        self._steering = Steering(config, fleet, self.client, self._clocks, self.engine_headers)
        for series in self._steering.series():
            self.metrics.add(series)
        self._affinity = self._steering.affinity
        legs = Legs(fleet, self.client, self._affinity, books)
        self._releases = Releases(legs, dialect, config.lease_s)
        caches = PrefixCaches(self.client, fleet, config.probe, self._clocks.monotonic)
        caches.headers = self.engine_headers
        self._route = Route(
            legs=legs,
            dialect=dialect,
            spec=spec,
            max_handle_age_s=config.lease_s * 0.5,
            lease_s=config.lease_s,
            linger_s=config.linger_s,
            serving=Stage.DECODE if fleet.needs(Stage.DECODE) else Stage.COLOCATED,
            releases=self._releases,
            introductions=Introductions(self.client, dialect),
            caches=caches,
            # Engines pair the stages by it and show it in answers: the next one must not follow from it.
            new_key=RandomIds().take,
        )
        self.admission = Admission(spec, self.metrics, self._clocks.monotonic)
        self._keys = client_keys(spec, self._clocks.monotonic)
        # Without keys of our own a client's credentials are the engines' business.
        self._credentials = Credentials() if self._keys is None else Credentials.behind_keys(self.engine_headers)
        self._chores: asyncio.Task[None] | None = None
        self._passing = Passing(legs, spec, self._route.serving)
        self._models = Models(config, fleet, self.client, self._clocks)
        self._pages = Pages(self, self._models, self._keys, self._credentials)
        fleet.on_gone(self._member_gone)

    async def start(self, host: str, port: int, *, shared: bool = False) -> None:
        """Take requests on `host` and `port`; 0 takes a free port, see `port`.

        Args:
            host: Address to listen on.
            port: TCP port.
            shared: Other routers listen on the same port.

        Raises:
            PreparationError: If the address cannot be bound, or the files for TLS cannot be used.
        """
        spec = self.config.spec
        raise_descriptor_limit(spec.max_in_flight)
        tls = server_tls(spec.ssl_certfile, spec.ssl_keyfile) if spec.ssl_certfile is not None else None
        await self.server.start(host, port, tls=tls, shared=shared)
        if self._keys is not None and self._keys.path is not None:
            self._chores = asyncio.create_task(self._keys.watch())
        await self._steering.start()
        log.info("listening on %s port %d", host, self.port)

    @property
    def port(self) -> int:
        """The port that requests come in on."""
        return self.server.port

    @property
    def in_flight(self) -> int:
        """Requests that clients have open."""
        return self.metrics.in_flight

    def change(self, spec: RouterSpec) -> tuple[list[str], list[str]]:
        """Take other settings, for requests that come from now on.

        Args:
            spec: All settings as they should be.

        Returns:
            Names of settings that have changed, and of those that only a restart changes.

        Raises:
            ConfigError: If a policy cannot be taken. Nothing is changed then.
        """
        in_force, taken, frozen = with_live_changes(self.config.spec, spec)
        # First what can be refused, so that a refusal leaves everything as it was.
        for stage in Stage:
            if policy_field(stage) in taken:
                self._affinity.check(stage, make_policy(getattr(in_force, policy_field(stage)), policy_field(stage)))
        self.config = replace(self.config, spec=in_force)
        self._route = replace(self._route, spec=in_force)
        self.admission.change(in_force)
        for stage in Stage:
            if policy_field(stage) in taken:
                self.set_policy(stage, getattr(in_force, policy_field(stage)))
        return taken, frozen

    def set_policy(self, stage: Stage, name: str) -> None:
        """Choose the instances of a stage by another policy from now on.

        Raises:
            ConfigError: If there is no policy of that name, or it needs what is only collected from the start.
        """
        field = policy_field(stage)
        self._affinity.set_policy(stage, make_policy(name, f"router.{field}"))
        self.config = replace(self.config, spec=self.config.spec.model_copy(update={field: name}))

    def set_log_level(self, level: int) -> None:
        """Say more or less from now on.

        Args:
            level: As `logging` has them.
        """
        logging.getLogger("disagg").setLevel(level)

    def motion(self, origin: Origin) -> Callable[[], bool]:
        """A question to ask later: whether anything has come from an engine since now, in a request under way."""
        before = self.client.marks(origin)
        return lambda: self.client.moved(before)

    def settled(self, member: Member) -> bool:
        """Whether what the fleet says of a member that takes no more requests is all that there is: always, here."""
        return True

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way.

        Returns:
            Whether all of them ended within `timeout_s` seconds.
        """
        return await self.server.drain(timeout_s)

    async def stop(self) -> None:
        """End everything at once, requests under way included."""
        if self._chores is not None:
            self._chores.cancel()
        await self.server.stop()
        await self._steering.stop()
        await self._releases.close()
        await self.client.close()
        await self._observer.close()

    def _member_gone(self, member: Member) -> None:
        self.client.forget(member.origin, UpstreamUnreachableError(f"its process {member.incarnation} is gone."))

    # Requests.

    def _handle(self, request: Request, respond: Responder) -> Awaitable[None]:
        # Not a coroutine itself: each further one is passed through whenever a request waits.
        endpoint = find(request.path)
        if endpoint is not None and request.method == endpoint.method:
            return self._serve(endpoint, request, respond)
        return self._show(endpoint, request, respond)

    async def _show(self, endpoint: Endpoint | None, request: Request, respond: Responder) -> None:
        """Answer what is no request to an engine: a page, or a path that is not served."""
        try:
            answer = await self._pages.answer(endpoint, request)
        except DisaggError as error:
            answer = error_reply(request.path, error)
        respond.send(answer.status, answer.body, ((b"x-request-id", self._id_of(request)), *answer.headers))

    def _refused_unread(self, error: DisaggError) -> Answer:
        """The answer to what is no request: not HTTP, too large, too slow, or ambiguous."""
        self.metrics.refused_unread(error_slug(error), error.status)
        answer = error_answer(error)
        fresh = self._clocks.new_id().encode("latin-1")
        return Answer(answer.status, answer.body, ((b"x-request-id", fresh), *answer.headers))

    async def _serve(self, endpoint: Endpoint, request: Request, respond: Responder) -> None:
        """Serve one request, and close its books whatever happens."""
        metrics = self.metrics
        record = Record(self._id_of(request), endpoint.path, self._clocks.monotonic())
        span = self._observer.began(request, record)
        metrics.in_flight += 1
        self._budget.request(record.started_at)
        try:
            await self._admit(endpoint, request, record, respond, span)
            if record.status >= 400:
                record.outcome = Outcome.REFUSED if record.status < 500 else Outcome.FAILED
        except DisaggError as error:
            record.fail(error.status, error_slug(error), str(error))
            _send(error_reply(endpoint.path, error), record, respond)
        except Exception:  # a bug of ours, told to the client with the id that the log has
            record.fail(500, "internal")
            if not respond.started:
                _send(error_reply(endpoint.path, DisaggError("Internal server error")), record, respond)
            raise
        except asyncio.CancelledError:
            record.outcome = Outcome.CLIENT_LEFT
            raise
        finally:
            metrics.in_flight -= 1
            self._observer.ended(request, record, span)

    async def _admit(
        self, endpoint: Endpoint, request: Request, record: Record, respond: Responder, span: RequestSpan | None
    ) -> None:
        """Check a request at the door, let it wait for a permit, and serve it.

        Raises:
            DisaggError: If it is not served and the client has not been sent anything.
        """
        admission, keys = self.admission, self._keys
        holder = keys.admit(request, record) if keys is not None else None
        admitted = False
        try:
            try:
                fields, serve = self._read(endpoint, request)
            except UnknownModelError:
                # An adapter may have been loaded since the engines were asked.
                if not await self._models.look_again(self._credentials.headers(request)):
                    raise
                fields, serve = self._read(endpoint, request)
            if holder is not None:
                holder.check_model(model_of(fields) or self.config.served_model_names[0])
            if span is not None:
                span.asked(fields)
            # Nobody waits while there is room.
            if admission.running < admission.limit:
                admission.running += 1
            else:
                await self._wait(admission, priority_of(request, fields), record)
            admitted = True
            await serve(record, respond)
        finally:
            if admitted:
                admission.leave()
            if holder is not None:
                holder.open -= 1

    async def _wait(self, admission: Admission, priority: int, record: Record) -> None:
        began = self._clocks.monotonic()
        try:
            await admission.wait(priority)
        finally:
            record.queue_s = self._clocks.monotonic() - began

    def _id_of(self, request: Request) -> bytes:
        """The client's own id for its request, or a fresh one; every answer has it."""
        return public_id(request) or self._clocks.new_id().encode("latin-1")

    def _read(self, endpoint: Endpoint, request: Request) -> tuple[Body, Serve]:
        """Check a request: its fields, and what serves it."""
        names, internal, credentials = self._models.names, self._dialect.internal_keys, self._credentials
        if endpoint.api is None:
            passed = read_passed(request, names, internal, credentials)
            return passed.fields, partial(self._passing.run, passed)
        intake = read_intake(endpoint.api, request, names, internal, credentials)
        check_length(intake, self._models.limit)
        intake = self._affinity.with_session(request, intake)
        return intake.body, partial(self._split, intake)

    def _split(self, intake: Intake, record: Record, respond: Responder) -> Awaitable[None]:
        """Serve a request over the stages."""
        dialect = self._dialect
        several = bodies.several(intake.api, intake.body) if dialect.primes else None
        # What was handed over by a leg of its own, decode finds in its cache.
        counts_handed_over = dialect.counts_handed_over or several is not None
        merge = merge_for(intake.api, intake.body, counts_handed_over=counts_handed_over)
        if is_fanned_out(self._route, intake):
            return Fanout(self._route, intake, record, respond, merge).run()
        return Journey(self._route, intake, record, respond, merge=merge).run()


def _send(answer: Answer, record: Record, respond: Responder) -> None:
    record.bytes_sent = len(answer.body)
    respond.send(answer.status, answer.body, [*record.headers(), *answer.headers])
