"""The shorthands in which users write a value, and what they stand for.

Each function here takes what a flag or a YAML file holds and returns the value in the form that the specs keep.
A value that is not in a known shorthand comes back as it is, so that the spec's own type says what is wrong.
"""

from __future__ import annotations

import json
import math
import re

from pydantic import JsonValue

from disagg.units import parse_id_group, parse_ports

_SUFFIXED = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgG])")
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
STORE_URL = r"^(lmcache|redis|rediss|mooncake)://[^/]+|^file:///.+"
"""What the URL of a KV store looks like."""
HTTP_URL = r"^https?://[^/?#\s]+"
"""What the URL of a web service looks like."""
ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""A text without control characters."""
PLAIN_NAME = r"^[^\x00-\x1f\x7f-\x9f-][^\x00-\x1f\x7f-\x9f]*$"
"""The same, and no engine takes it for a flag."""
HOST_NAME = r"^[A-Za-z0-9:_]([A-Za-z0-9:_%-]|[.](?![.])){0,252}$"
"""An address or a host name: no spaces, no empty part."""
_MAX_LABEL = 63
_INTEGER = re.compile(r"-?\d{1,18}")


def whole_number(value: object) -> object:
    """Expand ``8k`` to 8000 and ``8K`` to 8192, as vLLM does.

    Raises:
        ValueError: If a fraction is combined with a binary suffix.
    """
    match = _SUFFIXED.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    number, suffix = match.groups()
    if suffix in _DECIMAL:
        return round(float(number) * _DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"{value!r} mixes a fraction with a power of two; write {number}{suffix.lower()}")
    return int(number) * _BINARY[suffix]


def port_list(value: object) -> object:
    """Read ``9900``, ``"9900,9901"`` or a list as one port per instance.

    Raises:
        ValueError: If a text holds something that is not a port.
    """
    if isinstance(value, str):
        return parse_ports(",".join(re.sub(r"\s*,\s*", ",", value.strip()).split()))
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def group_list(value: object) -> object:
    """Read ``"0,1 2,3"``, ``0`` or a list as one device group per instance."""
    if isinstance(value, str):
        groups = re.sub(r"\s*,\s*", ",", value).split()
        return tuple(groups) if groups else (value,)
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def device_group(value: object) -> object:
    """Read one device group: ``0..15``, ``0,2,4``, the number 3, or a list of ids.

    Raises:
        ValueError: If the group is empty, has a reversed range, or repeats an id.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = str(value)
    elif isinstance(value, (list, tuple)) and all(
        isinstance(v, (int, str)) and not isinstance(v, bool) for v in value
    ):
        value = ",".join(str(v) for v in value)
    if isinstance(value, str):
        value = re.sub(r"\s+", "", value)
        if not value:
            raise ValueError("a device group is empty; write ids like 0,2,4 or ranges like 0..15")
        parse_id_group(value)
    return value


def name_list(value: object) -> object:
    """Read one text or a list of texts as a list."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def one_line(value: str) -> str:
    """Check that a text can stand on a command line and in a log.

    Raises:
        ValueError: If it holds control characters.
    """
    if not re.fullmatch(ONE_LINE, value):
        raise ValueError(f"{value[:60]!r} holds control characters; write it without")
    return value


def plain_name(value: str) -> str:
    """Check that a text can be the value of an engine's flag.

    Raises:
        ValueError: If it holds control characters, or begins with a dash.
    """
    if value.startswith("-"):
        raise ValueError(f"{value[:60]!r} begins with a dash, as flags do; for a path write ./{value[:20]}")
    return one_line(value)


def host_name(value: str) -> str:
    """Check the form of an address to bind to.

    Raises:
        ValueError: If it is neither an IP address nor a host name.
    """
    if not re.fullmatch(HOST_NAME, value) or any(len(label) > _MAX_LABEL for label in value.split(".")):
        raise ValueError(f"{value[:80]!r} is no address; write one such as 127.0.0.1, ::1, 0.0.0.0 or localhost")
    return value


def env_value(value: object) -> object:
    """Read a whole number as the text that an environment variable holds."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def http_url(value: str) -> str:
    """Check the form of an HTTP URL.

    Raises:
        ValueError: If the scheme is another one, or the host is missing.
    """
    if not re.match(HTTP_URL, value):
        raise ValueError(f"{value[:80]!r} is no URL such as http://127.0.0.1:4318/v1/traces")
    return value


def store_url(value: str) -> str:
    """Check the form of a KV store's URL.

    Raises:
        ValueError: If the scheme is unknown, or the host or folder is missing.
    """
    if not re.match(STORE_URL, value):
        raise ValueError(
            f"{value!r} is not the URL of a store; write lmcache://host:port, redis://host:port, "
            "mooncake://host:port or file:///directory"
        )
    return value


def parse_json(text: str) -> JsonValue:
    """Read strict JSON: no NaN or infinity, no key twice in one object.

    Raises:
        ValueError: If the text is not such JSON; the message says where.
    """
    try:
        value: JsonValue = json.loads(
            text, parse_constant=_refuse_constant, parse_int=_bounded, parse_float=_finite, object_pairs_hook=_unique
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos + 1} of {text!r}") from None
    except RecursionError:
        raise ValueError("is JSON nested too deeply") from None
    return value


def _refuse_constant(word: str) -> JsonValue:
    raise ValueError(f"holds {word}, which is not JSON")


def _bounded(text: str) -> int:
    if len(text) > 25:
        raise ValueError(f"holds the number {text[:25]}..., which is out of range")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"holds {text}, which is out of range")
    return number


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"holds the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return record


def json_map(value: JsonValue) -> JsonValue:
    """Read JSON text; anything else stays as it is.

    Raises:
        ValueError: If the text is not JSON.
    """
    return parse_json(value) if isinstance(value, str) else value


def qaic_config(value: JsonValue) -> JsonValue:
    """Read Qualcomm's compile settings in either spelling.

    The text form is items separated by spaces, ``key:value`` or ``key=value``, where a bare key means true; the
    other form is a JSON object. Names and meanings are left to the engine's adapter.

    Raises:
        ValueError: If an item is neither, or a key is given twice.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("{"):
        return parse_json(text)
    record: dict[str, JsonValue] = {}
    for item in text.split():
        key, value_text = _split_item(item)
        if key in record:
            raise ValueError(f"holds the key {key!r} twice")
        record[key] = True if value_text is None else _item_value(value_text)
    return record


def _split_item(item: str) -> tuple[str, str | None]:
    key, separator, value = re.fullmatch(r"([^:=]*)([:=]?)(.*)", item, re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"item {item!r} has no valid key; write items like key:value, key=value or key, separated by spaces, "
            "or one JSON object"
        )
    return key, value if separator else None


def _item_value(text: str) -> JsonValue:
    words: dict[str, JsonValue] = {"": True, "true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if text[0] in "[{":
        return parse_json(text)
    return text
