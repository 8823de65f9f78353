"""What the router answers itself: its own pages, and why a path or a method is not served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from disagg import __version__
from disagg.errors import MethodNotAllowedError, NotDisaggregableError, UnknownPathError
from disagg.http.messages import Answer, Request, json_answer
from disagg.http.server import Server
from disagg.router.apis import Endpoint, Way
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet
from disagg.router.framing import error_reply
from disagg.router.intake import Credentials
from disagg.router.keys import Keys
from disagg.router.metrics import CONTENT_TYPE, Metrics
from disagg.router.models import PATH as MODELS
from disagg.router.models import Models
from disagg.router.openapi import openapi_document
from disagg.router.whole import Whole

_OPEN = frozenset({"/health", "/metrics", "/version"})
"""Pages that need no key: what watches a deployment has none."""

Page = Callable[[Request], Awaitable[Answer]]


class Shown(Protocol):
    """The router as its pages see it.

    Attributes:
        config: Names and settings in force.
        fleet: Who is there.
        metrics: Its own numbers.
        server: Takes no further requests while it is closing.
        whole: What is shown instead of its own numbers, if it is one of several routers.
    """

    config: RouterConfig
    fleet: Fleet
    metrics: Metrics
    server: Server
    whole: Whole | None


class Pages:
    """Answers everything that no engine is asked to compute.

    Args:
        router: What is shown.
        models: The page of the models.
        keys: Who may see pages; None if everybody may.
        credentials: What engines are told about who asks.
    """

    def __init__(self, router: Shown, models: Models, keys: Keys | None, credentials: Credentials) -> None:
        self._router = router
        self._models = models
        self._keys = keys
        self._credentials = credentials
        self._pages: dict[str, Page] = {
            MODELS: self._list_models,
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
            "/openapi.json": self._openapi,
        }

    async def answer(self, endpoint: Endpoint | None, request: Request) -> Answer:
        """The answer to a request that no engine serves.

        Args:
            endpoint: Of its path, if it is one of an API.
            request: As it came.

        Raises:
            UnauthorizedError: If it has no valid key and needs one.
            UnknownPathError: If there is no such page.
        """
        if self._keys is not None and request.path not in _OPEN:
            self._keys.check(request)
        page = self._pages.get(request.path)
        if endpoint is not None:
            return _refused(request, endpoint)
        if page is None and request.path.startswith(f"{MODELS}/"):
            page = self._show_model
        if page is None:
            raise UnknownPathError(f"There is no {request.path} here.")
        if request.method in {"GET", "HEAD"}:
            return await page(request)
        return _wrong_method(request, b"GET, HEAD")

    async def _list_models(self, request: Request) -> Answer:
        return await self._models.answer(self._credentials.headers(request))

    async def _show_model(self, request: Request) -> Answer:
        return await self._models.one(request.path, self._credentials.headers(request))

    async def _health(self, request: Request) -> Answer:
        """200 only if each stage that the deployment needs has a ready instance."""
        router = self._router
        missing = router.fleet.missing_stages()
        closing = router.server.closing
        ready = not missing and not closing
        in_flight = None if router.whole is None else await router.whole.in_flight()
        status = "ready" if ready else "draining" if closing else "unavailable"
        instances = [
            {
                "name": m.name,
                "stage": m.stage,
                "state": m.shown_state,
                "in_flight": m.in_flight if in_flight is None else in_flight.get(m.name, 0),
                "url": m.url,
            }
            for m in router.fleet.members()
        ]
        return json_answer(200 if ready else 503, {"status": status, "missing": missing, "instances": instances})

    async def _metrics(self, request: Request) -> Answer:
        router = self._router
        page = router.metrics.render() if router.whole is None else await router.whole.page()
        return Answer(200, page, ((b"content-type", CONTENT_TYPE),))

    async def _openapi(self, request: Request) -> Answer:
        return json_answer(200, openapi_document(self._router.config.served_model_names))

    async def _version(self, request: Request) -> Answer:
        return json_answer(200, {"version": __version__})


def _refused(request: Request, endpoint: Endpoint) -> Answer:
    """Why a known path does not take this request."""
    if endpoint.way is Way.REFUSED:
        return error_reply(
            request.path,
            NotDisaggregableError(f"{request.path} is not served over several engines: {endpoint.about}."),
        )
    return _wrong_method(request, b"POST")


def _wrong_method(request: Request, allow: bytes) -> Answer:
    answer = error_reply(request.path, MethodNotAllowedError(f"{request.path} does not take {request.method}."))
    return Answer(answer.status, answer.body, (*answer.headers, (b"allow", allow)))
