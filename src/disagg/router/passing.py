"""Requests that one instance answers alone: they go to a stage that can, and come back as they are.

Tokenising, embeddings, scores, speech: nothing of it is handed over between stages. Bodies pass byte by byte unless
they hold keys that only a router may set; answers pass byte by byte, streamed or not. What the model cannot do is the
engine's own to say; only a path that it does not have at all gets a reason from us.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from disagg.engines import bodies
from disagg.engines.base import Body
from disagg.errors import BadRequestError, DisaggError, NoInstanceError, NotDisaggregableError, UpstreamError
from disagg.http.limits import LegTimes
from disagg.http.messages import Header, Request
from disagg.http.origin import Outgoing
from disagg.http.responder import Responder
from disagg.router.fleet import Member
from disagg.router.intake import Credentials, check_model, read_body
from disagg.router.legs import Failure, Leg, Legs
from disagg.router.record import Outcome, Path, Record
from disagg.router.relay import relayed_headers
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

_PASSED_ON = frozenset({b"content-type", b"accept"})
_NO_SUCH_PATH = b'{"detail":"Not Found"}'
"""What an engine says of a path that it has not registered: an unknown model is told in another way."""
_ALONE = "disagg route --colocated URL"


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A request that may be passed on.

    Attributes:
        target: Path and query.
        headers: The client's headers that reach the engine.
        body: What the engine gets.
        fields: The keys of the body, if it is JSON.
    """

    target: str
    headers: tuple[Header, ...]
    body: bytes
    fields: Body


def read_passed(
    request: Request, names: Collection[str], internal: frozenset[str], credentials: Credentials
) -> PassedRequest:
    """Check a request that is passed on.

    Args:
        request: As it came.
        names: Models that are served here.
        internal: Body keys that are removed.
        credentials: Which headers reach the engines.

    Raises:
        BadRequestError: If the body is declared as JSON and is no JSON object, or hides what only a router may set.
        UnknownModelError: If it names a model that is not served here.
    """
    media_type = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    body = request.body
    fields: Body = {}
    if media_type == b"multipart/form-data":
        _check_form(body, internal)
    else:
        fields = read_body(request)
        check_model(fields, names)
        if bodies.holds_internal(fields, internal):
            body = bodies.encode(bodies.client_body(fields, internal))
    headers = (*credentials.headers(request), *[h for h in request.headers if h[0] in _PASSED_ON])
    return PassedRequest(request.target, headers, body, fields)


def _check_form(body: bytes, internal: frozenset[str]) -> None:
    """A form is not taken apart, so what it must not hold is refused wherever it stands."""
    for key in ("vllm_xargs", *sorted(internal)):
        # Short names would turn up in any recording.
        if len(key) > 9 and key.encode() in body:
            raise BadRequestError(f"A form with {key} is not served here.", param=key)


class Passing:
    """Passes requests on.

    Args:
        legs: Chooses instances and sends requests.
        spec: Limits.
        serving: The stage that answers: decode, or colocated.
    """

    def __init__(self, legs: Legs, spec: RouterSpec, serving: Stage) -> None:
        self._legs = legs
        self._spec = spec
        self._serving = serving

    async def run(self, passed: PassedRequest, record: Record, respond: Responder) -> None:
        """Serve one request to its end. An instance that cannot be connected to is replaced by another one.

        Raises:
            DisaggError: If it cannot be served and the client has not been sent anything.
        """
        record.path = Path.PASSED
        excluded: set[str] = set()
        failure: Failure | None = None
        while True:
            member = self._legs.pick(self._serving, (), excluded)
            if member is None:
                if failure is not None and failure.error is not None:
                    raise failure.error
                raise NoInstanceError(
                    f"No {self._serving} instance is ready.", hint="See /health for the state of each instance."
                )
            failure = await self._pass(member, passed, record, respond)
            if failure is None:
                return
            record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
            if not failure.refused or record.retries >= self._spec.retries or not self._legs.take_retry(member.stage):
                raise failure.error or DisaggError("Internal server error")
            record.retries += 1
            excluded.add(member.name)

    async def _pass(
        self, member: Member, passed: PassedRequest, record: Record, respond: Responder
    ) -> Failure | None:
        record.decode = member.name
        total_s = self._spec.request_timeout_s
        headers = ((b"x-request-id", record.public_id), *passed.headers)
        outgoing = Outgoing("POST", passed.target, headers, passed.body, resend=False)
        with self._legs.open(member) as leg:
            try:
                await self._legs.send(leg, outgoing, LegTimes(total_s, self._spec.idle_timeout_s, total_s))
                await self._relay(leg, record, respond)
            except UpstreamError as error:
                failure = leg.fail(error)
                if not respond.started:
                    return failure
                # No event says that a plain body broke off: only a connection that ends too early does.
                record.outcome = Outcome.BROKEN
                record.detail = f"{failure.stage} {failure.instance}: {failure.outcome}"
                respond.abort()
        return None

    async def _relay(self, leg: Leg, record: Record, respond: Responder) -> None:
        response = leg.response
        if response is None:
            raise DisaggError("Internal server error")
        headers = [*record.headers(), *relayed_headers(response.headers)]
        record.status = response.status
        record.first_byte_at = self._legs.now() if response.status < 400 else 0.0
        leg.outcome = "ok" if response.status < 400 else "refused" if response.status < 500 else "failed"
        if response.complete or response.status == 404:
            body = await response.read()
            if response.status == 404 and body == _NO_SUCH_PATH:
                raise NotDisaggregableError(
                    f"No engine behind this endpoint serves {record.api} with this model.",
                    hint=f"Engines that do (vLLM: --runner pooling) take an endpoint of their own: {_ALONE}",
                )
            record.bytes_sent = len(body)
            respond.send(response.status, body, headers)
            return
        length = response.header(b"content-length")
        known = int(length) if length is not None and length.isdigit() else None
        respond.start(response.status, headers, length=known)
        respond.on_flow(lambda writable: response.resume() if writable else response.pause())

        def write(data: bytes) -> None:
            record.bytes_sent += len(data)
            respond.write(data)

        await response.relay(write)
        respond.finish()
