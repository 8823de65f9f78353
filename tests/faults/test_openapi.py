"""The router against its own OpenAPI document: whatever fits it, or just does not, gets an answer that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from disagg.engines.base import Peer
from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.router.apis import ENDPOINTS
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.openapi import openapi_document
from disagg.topology.spec import Stage
from tests.support.wire import request
from tests.unit.engines_emulated.running import Running, pair, running

schema = schemathesis.openapi.from_dict(dict(openapi_document(["toy"])))


async def start_router(up: Running) -> Router:
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    for stage, instance in zip((Stage.PREFILL, Stage.DECODE), up.instances, strict=True):
        engine_id = instance.settings.engine_id
        fleet.add(str(stage), stage, instance.url, engine_id, Peer(engine_id))
        fleet.mark(str(stage), engine_id, State.READY)
    router = Router(RouterConfig(("toy",), access_log=False), PullDialect(), fleet)
    await router.start("127.0.0.1", 0)
    return router


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A router over emulated engines; afterwards it is alive, and no block is lost."""
    with running(*pair()) as up:
        router = up.call(start_router(up))
        address = f"http://127.0.0.1:{router.port}"
        yield address
        assert request(address, "/health").status == 200
        answer = request(address, "/v1/completions", {"model": "toy", "prompt": "still there", "max_tokens": 2})
        assert answer.status == 200
        for index in (0, 1):
            assert up.state(index)["running"] == 0
        up.call(router.stop())


@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_every_answer_is_one_that_the_document_names(case: Any, url: str) -> None:
    """Generated requests, well formed and not: no 5xx of our own but the documented 501, and no crash."""
    response = case.call(base_url=url)
    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
    if response.status_code != 501:
        checks.append(not_a_server_error)
    case.validate_response(response, checks=checks)


def test_the_document_has_every_endpoint_and_is_served(url: str) -> None:
    """It is made from the table that the router itself uses."""
    served = request(url, "/openapi.json")
    assert served.status == 200
    paths = served.json()["paths"]
    assert {e.path.replace("/*", "/{rest}") for e in ENDPOINTS} < set(paths)
    for page in ("/health", "/metrics", "/version", "/v1/models"):
        assert request(url, page).status == 200
        assert page in paths
