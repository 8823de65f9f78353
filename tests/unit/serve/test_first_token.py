"""The first request after a start, whose time the summary shows."""

import re
from dataclasses import replace

import msgspec

from disagg.http.client import Client
from disagg.http.limits import ClientLimits
from disagg.serve.first_token import first_token
from tests.support.mock_engine import MockEngine, answers
from tests.unit.serve.test_dry_run import deployment


async def _said(engine: MockEngine) -> str:
    """What is said about an endpoint that behaves like this engine."""
    await engine.start()
    client = Client(ClientLimits())
    try:
        one = deployment()
        port = int(engine.url.rpartition(":")[2])
        return await first_token(client, replace(one, topology=one.topology.model_copy(update={"port": port})))
    finally:
        await client.close()
        await engine.stop()


async def test_the_time_is_that_of_one_token_through_the_endpoint() -> None:
    """What is timed is a request as a user would send it, for the served model, limited to one token."""
    engine = MockEngine(answers(200, b"{}"))
    assert re.fullmatch(r"after \d+\.\d\d s, through the endpoint", await _said(engine))
    (body,) = engine.bodies
    assert body["model"] == "m"
    assert body["max_tokens"] == 1


async def test_an_endpoint_that_fails_its_first_request_says_so() -> None:
    """A deployment that is ready but cannot answer is not praised with a time."""
    body = msgspec.json.encode({"error": {"message": "broken"}})
    assert "none: the endpoint answered 500" in await _said(MockEngine(answers(500, body)))


async def test_an_endpoint_that_is_gone_is_told_and_ends_nothing() -> None:
    """The summary still appears."""
    client = Client(ClientLimits())
    one = deployment()
    gone = replace(one, topology=one.topology.model_copy(update={"port": 1}))
    assert (await first_token(client, gone)).startswith("none: ")
    await client.close()
