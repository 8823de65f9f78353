"""What must not be shown: keys, passwords and tokens, wherever a configuration is printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # keepers read this with the standard library alone
    from pydantic import JsonValue

HIDDEN = "********"
"""Stands in the place of a secret."""

_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|SECRET_KEY|CREDENTIALS)$")
_PLACES = frozenset({"router.api_key"})
_IN_URL = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*(?=@)")


def is_secret(variable: str) -> bool:
    """Whether an environment variable's name says that its value must not be shown or stored."""
    return _VARIABLE.search(variable.upper()) is not None


def without_password(text: str) -> str:
    """The text with the passwords of URLs in it hidden."""
    return _IN_URL.sub(rf"\1:{HIDDEN}", text) if "://" in text else text


def masked(path: str, value: JsonValue) -> JsonValue:
    """A configuration's value as it may be shown.

    Args:
        path: Its place, such as ``router.api_key``.
        value: As it was given.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return HIDDEN if _hides(path) and value is not None else value
    if isinstance(value, dict):
        return {key: masked(f"{path}.{key}" if path else key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [HIDDEN if _hides(path) else masked(path, item) for item in value]
    return HIDDEN if _hides(path) else without_password(value)


def masked_words(words: Iterable[str]) -> list[str]:
    """A command line as it may be shown: what follows a secret flag is hidden, and so are passwords in URLs."""
    shown: list[str] = []
    hide = False
    for word in words:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("-") and is_secret(flag.lstrip("-").replace("-", "_"))
        if hide and not word.startswith("-"):
            shown.append(HIDDEN)
            continue
        hide = secret and not equals
        shown.append(f"{flag}={HIDDEN}" if secret and equals else without_password(word))
    return shown


def _hides(path: str) -> bool:
    if path in _PLACES:
        return True
    words = path.split(".")
    return any(part in words[:-1] for part in ("env", "engine_args")) and is_secret(words[-1].replace("-", "_"))
