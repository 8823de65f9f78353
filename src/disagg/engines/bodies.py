"""Reading and rewriting a request body at its top level, shared by the dialects.

Values stay the bytes that the client wrote: a re-ordered `tools` list or a re-spelled number renders to another
prompt on one leg than on the other. Only a value that decides the path is decoded, and only when it is there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from disagg.engines.api_fields import FIELDS
from disagg.engines.base import Api, Body, Transfer

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
ZERO = msgspec.Raw(b"0")

_SEVERAL = (("n", "n-greater-1"), ("best_of", "best-of-greater-1"))
_TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
# Objects inside a body that engines merge into what their connectors read.
_HIDING = frozenset({"vllm_xargs", "sampling_params"})
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
    # The first characters tell it nearly always, and a prompt may be megabytes.
    text = bytes(memoryview(raw)[:64]).lstrip()
    if len(text) < 2:
        text = bytes(raw).lstrip()
    if not text.startswith(b"["):
        return False
    first = text[1:].lstrip()[:1] or bytes(raw).lstrip()[1:].lstrip()[:1]
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


def several(api: Api, body: Body) -> str | None:
    """What makes several sequences of one prompt in an engine, as a short slug; None if nothing does."""
    if not FIELDS[api].choices:
        return None
    if "use_beam_search" in body and is_true(body, "use_beam_search"):
        return "beam-search"
    settings = sampling(api, body)
    for key, reason in _SEVERAL:
        if key in settings and is_more_than_one(settings, key):
            return reason
    return None


def choices_per_prompt(api: Api, body: Body) -> int:
    """How many choices an answer has for each of its prompts, with the spellings that pydantic accepts."""
    try:
        return max(1, int(number_at(sampling(api, body), "n")))
    except (ValueError, OverflowError):
        return 1


def priming(api: Api, body: Body) -> Body:
    """The client's body as a leg that only fetches KV asks it: the same prompt, one token, one choice, no stream."""
    leg = about_the_answer(api, body)
    _cap_all(leg, api, ONE)
    return leg


def about_the_answer(api: Api, body: Body) -> Body:
    """The client's body without what prefill tells about the prompt."""
    told = {"prompt_logprobs", "echo"} if api is Api.COMPLETIONS else {"prompt_logprobs"}
    return {key: value for key, value in body.items() if key not in told}


def prefill_leg(api: Api, body: Body, internal: frozenset[str], transfer: Transfer) -> dict[str, msgspec.Raw]:
    """The client's body as prefill gets it: the same prompt, one token, one choice, not streamed.

    What else the client set stays, so that prefill's validation refuses what decode's would, before KV is pinned.

    Args:
        api: What the client called.
        body: What it sent.
        internal: Keys that are removed.
        transfer: The attempt, which names the leg for APIs that take a request's id from the body.
    """
    leg = client_body(body, internal)
    _cap_all(leg, api, ZERO if api is Api.COMPLETIONS and "echo" in leg and is_true(leg, "echo") else ONE)
    _name(leg, api, transfer.key)
    return leg


def decode_leg(api: Api, body: Body, internal: frozenset[str], transfer: Transfer | None) -> dict[str, msgspec.Raw]:
    """The client's body as decode gets it.

    Args:
        api: What the client called.
        body: What it sent.
        internal: Keys that are removed.
        transfer: The attempt; None for a run on decode alone. With it, prefill tells about the prompt, and decode is
            not asked: it would have to compute all of it again.
    """
    leg = client_body(body, internal)
    if transfer is not None:
        leg.pop("prompt_logprobs", None)
        if api is Api.COMPLETIONS:
            leg.pop("echo", None)
        _name(leg, api, transfer.key)
    return leg


def _cap_all(leg: dict[str, msgspec.Raw], api: Api, cap: msgspec.Raw) -> None:
    """Ask for one token and one choice, wherever the API keeps that, and for no stream."""
    fields = FIELDS[api]
    leg.pop("stream_options", None)
    if fields.nested is None:
        _cap(leg, api, cap)
    elif (inner := _read_object(leg.get(fields.nested))) is not None:
        _cap(inner, api, cap)
        leg[fields.nested] = msgspec.Raw(encode(inner))
    leg.update(fields.fixed)


def _cap(fields: dict[str, msgspec.Raw], api: Api, cap: msgspec.Raw) -> None:
    """Ask for one token and one choice."""
    table = FIELDS[api]
    for key in table.floors:
        fields.pop(key, None)
    for key in table.caps:
        fields[key] = cap
    for key in table.choices:
        if key in fields and is_more_than_one(fields, key):
            fields[key] = ONE


def _name(leg: dict[str, msgspec.Raw], api: Api, key: str) -> None:
    table = FIELDS[api]
    if table.id_key is not None:
        leg[table.id_key] = msgspec.Raw(encode_text(table.id_prefix + key))


def holds_internal(body: Body, internal: frozenset[str]) -> bool:
    """Whether `client_body` might have something to remove."""
    return not internal.isdisjoint(body) or not _HIDING.isdisjoint(body)


def client_body(body: Body, internal: frozenset[str]) -> dict[str, msgspec.Raw]:
    """A copy of the body without the keys that only a router may set, wherever an engine would find them.

    vLLM merges ``vllm_xargs``, and the tokens-in API's ``sampling_params.extra_args``, into the same dictionary that
    its connectors read, so a key hidden there arrives as if the router had set it.
    """
    if not holds_internal(body, internal):
        return dict(body)
    kept = {key: value for key, value in body.items() if key not in internal}
    _clean(kept, "vllm_xargs", internal)
    settings = kept.get("sampling_params")
    inner = _read_object(settings)
    if inner is not None and "extra_args" in inner:
        _clean(inner, "extra_args", internal)
        kept["sampling_params"] = msgspec.Raw(encode(inner))
    return kept


def _clean(fields: dict[str, msgspec.Raw], key: str, internal: frozenset[str]) -> None:
    """Remove internal keys from an object inside a body; all of it, if it cannot be read safely."""
    extra = fields.get(key)
    if extra is None:
        return
    cleaned = _without_keys(extra, internal)
    if cleaned is None:
        del fields[key]
    else:
        fields[key] = cleaned


def sampling(api: Api, body: Body) -> Body:
    """Where the request's sampling settings are: in the body itself, or in an object inside it."""
    nested = FIELDS[api].nested
    return body if nested is None else _read_object(body.get(nested)) or {}


def unmergeable(api: Api, body: Body) -> str | None:
    """Why two answers could not be put together to what one engine would say: a short slug, or None if they can.

    Only for requests that want something of the prompt (`echo`, `prompt_logprobs`); all others need no merging.
    """
    settings = sampling(api, body)
    if not is_null(settings, "prompt_logprobs"):
        if api not in {Api.CHAT, Api.COMPLETIONS}:
            return "prompt-logprobs"
        if "stream" in body and is_true(body, "stream"):
            return "prompt-logprobs-streamed"  # the engine refuses it, in its own words
    if "echo" not in body or not is_true(body, "echo"):
        return None
    if api is not Api.COMPLETIONS:
        return "echo"
    if "return_token_ids" in body and is_true(body, "return_token_ids"):
        return "echo-token-ids"
    limit = _scalar_at(body, "max_tokens")
    return "echo-alone" if limit == 0 and limit is not False else None


def wants_prompt(api: Api, body: Body) -> bool:
    """Whether a part of the answer is prefill's to give: the prompt itself, or its log probabilities."""
    if "echo" in body and is_true(body, "echo"):
        return True
    return not is_null(sampling(api, body), "prompt_logprobs")


def prompt_ids(api: Api, body: Body) -> int | None:
    """How many token ids the prompt consists of; None if it is a text, or several prompts, or cannot be read."""
    key = FIELDS[api].ids_key
    raw = body.get(key) if key is not None else None
    if raw is None:
        return None
    text = bytes(raw)
    start = text.lstrip()[:1]
    if start != b"[" or b'"' in text or text.count(b"[") != 1:
        return None
    return text.count(b",") + 1


def split_prompts(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The prompts of a list, each as the client wrote it.

    Raises:
        ValueError: If it is not a list.
    """
    try:
        return _array.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("not a list of prompts") from error


def encode_text(text: str) -> bytes:
    """A JSON string."""
    return _encoder.encode(text)


def _read_object(raw: msgspec.Raw | None) -> dict[str, msgspec.Raw] | None:
    """The keys of an object; None if it is none."""
    if raw is None:
        return None
    try:
        return _object.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


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


def number_at(body: Body, key: str) -> float:
    """A number, or 0 where there is none."""
    value = _scalar_at(body, key)
    try:
        return float(value or 0)
    except ValueError:
        return 0.0


def _scalar_at(body: Body, key: str) -> JsonScalar:
    raw = body.get(key)
    if raw is None:
        return None
    try:
        return _scalar.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
