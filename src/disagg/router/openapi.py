"""The endpoint's OpenAPI document, made from the table of APIs, so that the two cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg import __version__
from disagg.engines.base import Api
from disagg.router.apis import ENDPOINTS, Endpoint, Way

Json = Mapping[str, object]

_TEXT: Json = {"type": "string"}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_COMMON: Json = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "max_tokens": {"type": "integer", "minimum": 1},
}
_MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
    },
}
_PROMPT: Json = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS]}
_BODIES: Mapping[str, tuple[Json, tuple[str, ...]]] = {
    Api.CHAT: ({**_COMMON, "messages": _MESSAGES, "n": {"type": "integer", "minimum": 1}}, ("messages",)),
    Api.COMPLETIONS: ({**_COMMON, "prompt": _PROMPT, "n": {"type": "integer", "minimum": 1}}, ("prompt",)),
    Api.RESPONSES: ({"model": _TEXT, "stream": {"type": "boolean"}, "input": _TEXT}, ("input",)),
    Api.MESSAGES: ({**_COMMON, "messages": _MESSAGES}, ("messages", "max_tokens")),
    Api.GENERATE: ({"token_ids": _IDS, "sampling_params": {"type": "object"}}, ("token_ids", "sampling_params")),
}
_PAGES: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "/v1/models": ("The models that are served", "application/json", (200,)),
    "/health": ("Whether each stage has a ready engine", "application/json", (200, 503)),
    "/metrics": ("Prometheus metrics", "text/plain", (200,)),
    "/version": ("Version of the router", "application/json", (200,)),
    "/openapi.json": ("This document", "application/json", (200,)),
}
_STATUSES: Mapping[int, str] = {
    400: "The request is wrong",
    401: "No key, or a wrong one",
    403: "This key may not, or the engine has it switched off",
    404: "No such model",
    408: "The request arrived too slowly",
    413: "The body is too large",
    415: "The engine does not take this media type",
    422: "The engine does not take this body",
    429: "Too many requests; see Retry-After",
    431: "The headers are too large",
    500: "The engine failed",
    501: "It cannot be served over separate stages, and why",
    502: "The engine cannot be reached, or makes no sense",
    503: "No engine of a stage that is needed is ready; see Retry-After",
    504: "The engine did not answer in time",
}
_ERROR: Json = {"$ref": "#/components/schemas/Error"}


def openapi_document(names: Sequence[str]) -> Json:
    """The document as a value that can be written as JSON.

    Args:
        names: Models that are served.
    """
    paths: dict[str, dict[str, object]] = {}
    for endpoint in ENDPOINTS:
        path = endpoint.path[:-1] + "{rest}" if endpoint.path.endswith("/*") else endpoint.path
        operations = paths.setdefault(path, {})
        if endpoint.way is Way.REFUSED:
            operations.update({method: _refused(endpoint, method) for method in ("get", "post")})
        else:
            operations["post"] = _served(endpoint)
    for path, (about, media_type, statuses) in _PAGES.items():
        content = {media_type: {"schema": {} if media_type == "text/plain" else {"type": "object"}}}
        answers = {str(s): {"description": about, "content": content} for s in statuses}
        paths[path] = {"get": {"summary": about, "responses": {**answers, "401": _error(401)}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "disagg",
            "version": __version__,
            "description": f"OpenAI-compatible endpoint in front of separate stages. Models: {', '.join(names)}.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _error_schema()}},
    }


def _served(endpoint: Endpoint) -> Json:
    properties, required = _BODIES.get(endpoint.path, ({"model": _TEXT}, ()))
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return {
        "summary": endpoint.about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The answer as the engine gives it",
                "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}},
            },
            **{str(status): _error(status) for status in _STATUSES},
        },
    }


def _refused(endpoint: Endpoint, method: str) -> Json:
    operation: dict[str, object] = {
        "summary": f"Not served: {endpoint.about}",
        "responses": {str(status): _error(status) for status in (401, 501)},
    }
    if endpoint.path.endswith("/*"):
        rest = {"name": "rest", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [rest]
    return {**operation, "operationId": f"{method} {endpoint.path}"}


def _error(status: int) -> Json:
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": _ERROR}}}


def _error_schema() -> Json:
    """Errors of OpenAI's, Anthropic's and the engines' own forms are all objects."""
    return {"type": "object", "minProperties": 1}
