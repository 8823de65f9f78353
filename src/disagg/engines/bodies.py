"""Reading and rewriting a request body at its top level, shared by the dialects.

Values stay the bytes that the client wrote: a re-ordered `tools` list or a re-spelled number renders to another
prompt on one leg than on the other. Only a value that decides the path is decoded, and only when it is there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from disagg.engines.base import Api, Body

INTERNAL_KEYS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disaggregated_params",
        "request_id",
        "rid",
    }
)
"""Body keys by which engines address caches and requests inside a deployment, whatever the engine."""

JsonScalar = str | int | float | bool | None

FALSE = msgspec.Raw(b"false")
ONE = msgspec.Raw(b"1")

# Refused beside a cap of one token and without a stream; neither shapes the prompt.
_NOT_ON_PREFILL = ("stream_options", "min_tokens")
_CAPS: Mapping[Api, tuple[str, ...]] = {
    # Chat takes max_completion_tokens before max_tokens when a body has both.
    Api.CHAT: ("max_tokens", "max_completion_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
}
_TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
_encoder = msgspec.json.Encoder()
_scalar = msgspec.json.Decoder(JsonScalar)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


def encode(body: Mapping[str, msgspec.Raw]) -> bytes:
    """Write a body: keys in their order, values byte by byte as they are."""
    return _encoder.encode(body)


def is_null(body: Body, key: str) -> bool:
    """Whether a key is absent or null."""
    raw = body.get(key)
    return raw is None or bytes(raw).strip() == b"null"


def is_true(body: Body, key: str) -> bool:
    """Whether a flag is set, with the spellings that pydantic accepts besides ``true``: 1, "on", "yes", ..."""
    value = _scalar_at(body, key)
    if isinstance(value, str):
        return value.strip().lower() in _TRUE_WORDS
    return value == 1


def is_more_than_one(body: Body, key: str) -> bool:
    """Whether a count is above 1. What is no number is not: the engine's own validation has the better message."""
    value = _scalar_at(body, key)
    if isinstance(value, str):
        try:
            return float(value) > 1
        except ValueError:
            return False
    return value is not None and value > 1


def holds_several(raw: msgspec.Raw) -> bool:
    """Whether a completion prompt is a list of several prompts, as opposed to one text or one list of token ids.

    A list with one text, or with one list of ids, is one prompt.
    """
    text = bytes(raw).lstrip()
    if not text.startswith(b"["):
        return False
    first = text[1:].lstrip()[:1]
    if first not in {b'"', b"["}:
        return False
    try:
        return len(_array.decode(raw)) > 1
    except (msgspec.DecodeError, RecursionError):
        return True


def prompt_count(raw: msgspec.Raw) -> int:
    """How many prompts a completion's `prompt` holds; what cannot be read is one, and the engine's to refuse."""
    if not holds_several(raw):
        return 1
    try:
        return len(_array.decode(raw))
    except (msgspec.DecodeError, RecursionError):
        return 1


def count_at(body: Body, key: str) -> int:
    """A count of at least 1; what is no such number is 1, and the engine's to refuse."""
    value = _scalar_at(body, key)
    return value if isinstance(value, int) and value > 1 else 1


def prefill_leg(api: Api, body: Body, internal: frozenset[str]) -> dict[str, msgspec.Raw]:
    """The client's body as prefill gets it: the same prompt, one token, one choice, not streamed.

    What else the client set stays, so that prefill's validation refuses what decode's would, before KV is pinned.
    """
    leg = client_body(body, internal)
    for key in _NOT_ON_PREFILL:
        leg.pop(key, None)
    for cap in _CAPS[api]:
        leg[cap] = ONE
    if is_more_than_one(leg, "n"):
        leg["n"] = ONE
    leg["stream"] = FALSE
    return leg


def client_body(body: Body, internal: frozenset[str]) -> dict[str, msgspec.Raw]:
    """A copy of the body without the keys that only a router may set, at the top level and in ``vllm_xargs``.

    vLLM merges ``vllm_xargs`` into the same dictionary that its connectors read, so a key hidden there arrives as
    if the router had set it.
    """
    kept = {key: value for key, value in body.items() if key not in internal}
    extra = kept.get("vllm_xargs")
    if extra is not None:
        cleaned = _without_keys(extra, internal)
        if cleaned is None:
            del kept["vllm_xargs"]
        else:
            kept["vllm_xargs"] = cleaned
    return kept


def _without_keys(raw: msgspec.Raw, keys: frozenset[str]) -> msgspec.Raw | None:
    """The object without these keys, unchanged if it has none of them; None if it cannot be read safely."""
    try:
        fields = _object.decode(raw)
    except msgspec.ValidationError:
        return raw  # not an object: the engine refuses it, or ignores a null
    except (msgspec.DecodeError, RecursionError):
        return None  # JSON that other parsers may accept; what it holds cannot be told
    if keys.isdisjoint(fields):
        return raw
    return msgspec.Raw(encode({key: value for key, value in fields.items() if key not in keys}))


def _scalar_at(body: Body, key: str) -> JsonScalar:
    raw = body.get(key)
    if raw is None:
        return None
    try:
        return _scalar.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
