"""The first request through the finished deployment, so that the user reads a measured time and not a promise."""

from __future__ import annotations

import time

import msgspec

from disagg.engines.base import Api
from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE
from disagg.http.origin import Origin, Outgoing
from disagg.serve.deployment import Deployment

_LIMIT_S = 120.0
_MAX_ANSWER_BYTES = 1024**2


async def first_token(client: Client, deployment: Deployment) -> str:
    """Ask the endpoint for one token, and say how long it took or what went wrong."""
    body = {"model": deployment.served_model_names[0], "prompt": "The capital of France is", "max_tokens": 1}
    outgoing = Outgoing("POST", Api.COMPLETIONS.value, (JSON_TYPE,), msgspec.json.encode(body), resend=False)
    began = time.monotonic()
    try:
        response = await client.request(
            Origin.parse(deployment.url), outgoing, LegTimes(_LIMIT_S, _LIMIT_S, _LIMIT_S)
        )
        try:
            answer = await response.read(_MAX_ANSWER_BYTES)
        finally:
            response.close()
    except UpstreamError as error:
        return f"none: {error}"
    if response.status != 200:
        return f"none: the endpoint answered {response.status}: {answer.decode(errors='replace')[:200]}"
    return f"after {time.monotonic() - began:.2f} s, through the endpoint"
