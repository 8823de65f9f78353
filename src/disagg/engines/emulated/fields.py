"""Reads request bodies as strictly and as leniently as vLLM's own schema does, with its words for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.errors import BadRequestError


class MalformedBodyError(BadRequestError):
    """The body does not fit the schema; vLLM names this class of errors by the status phrase."""

    kind = "Bad Request"


class UnreadableBodyError(MalformedBodyError):
    """The body is no text. The framework answers this before vLLM sees it, in a shape of its own."""


def _summary(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "...[truncated]"
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def schema_error(*problems: dict[str, Any] | str) -> MalformedBodyError:
    """The error of a body that does not fit, as one line per problem."""
    lines = "".join(f"\n  {problem}" for problem in problems)
    count = len(problems)
    first = problems[0]
    param = first["loc"] if isinstance(first, dict) else None
    return MalformedBodyError(f"{count} validation error{'s' if count > 1 else ''}:{lines}", param=param)


def problem(kind: str, where: str, message: str, value: object) -> dict[str, Any]:
    """One problem, as the schema library prints it."""
    return {"type": kind, "loc": where, "msg": message, "input": _summary(value)}


def rejected(message: str, param: str | None = None, value: object = None) -> BadRequestError:
    """A value that fits the schema and cannot be served; the parameter is repeated in the message, as vLLM does."""
    extras = [f"parameter={param}"] if param is not None else []
    if value is not None:
        extras.append(f"value={value}")
    return BadRequestError(f"{message} ({', '.join(extras)})" if extras else message, param=param)


def read_object(body: bytes, content_type: bytes | None) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        MalformedBodyError: If the content type, the JSON or the type of the whole is wrong.
    """
    media = (content_type or b"").split(b";", 1)[0].strip().lower()
    if media != b"application/json":
        raise schema_error("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        value = msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = _read_slowly(body)
    if value is None:
        raise schema_error(problem("missing", "body", "Field required", None))
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise schema_error(problem("model_attributes_type", "body", message, value))
    return value


def _read_slowly(body: bytes) -> object:
    """Python's own parser: it takes a little more (NaN), and says where and why the rest is wrong."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        found = problem("json_invalid", f"body.{error.pos}", "JSON decode error", {})
        raise schema_error(found | {"ctx": {"error": error.msg}}) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, deep nesting
        raise UnreadableBodyError("There was an error parsing the body") from error


class Fields:
    """Typed access to a body. Problems are collected; `done` raises them all at once."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.problems: list[dict[str, Any]] = []

    def done(self) -> None:
        """Raise what was found.

        Raises:
            MalformedBodyError: If any field had a wrong type.
        """
        if self.problems:
            raise schema_error(*self.problems)

    def integer(self, name: str) -> int | None:
        """A whole number; a string of digits and a whole float count as one."""
        value = self.body.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, float):
            if value.is_integer():
                return int(value)
            self._add("int_from_float", name, "Input should be a valid integer, got a number with a fractional part")
        elif isinstance(value, bool):
            return int(value)
        elif isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                message = "Input should be a valid integer, unable to parse string as an integer"
                self._add("int_parsing", name, message)
        else:
            self._add("int_type", name, "Input should be a valid integer")
        return None

    def number(self, name: str) -> float | None:
        """A number; a string that reads as one counts."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                message = "Input should be a valid number, unable to parse string as a number"
                self._add("float_parsing", name, message)
        else:
            self._add("float_type", name, "Input should be a valid number")
        return None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; 0, 1 and the usual words count."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        words = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        known = words.get(str(value).lower()) if isinstance(value, str | int) else None
        if known is None:
            if isinstance(value, str | int | float):
                self._add("bool_parsing", name, "Input should be a valid boolean, unable to interpret input")
            else:
                self._add("bool_type", name, "Input should be a valid boolean")
            return default
        return known

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.body.get(name)
        if value is None or isinstance(value, str):
            return value
        self._add("string_type", name, "Input should be a valid string")
        return None

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value = self.body.get(name)
        if value is None or isinstance(value, dict):
            return value
        self._add("dict_type", name, "Input should be a valid dictionary")
        return None

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers, empty if absent."""
        value = self.body.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self._add("list_type", name, "Input should be a valid list")
            return []
        for index, item in enumerate(value):
            if not isinstance(item, int):
                self._add("int_type", f"{name}.{index}", "Input should be a valid integer", item)
        return [item for item in value if isinstance(item, int)]

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """One string or a list of at most `most`, empty if absent."""
        value = self.body.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and len(value) <= most and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._add("string_type", name, "Input should be a valid string")
        if not isinstance(value, list):
            self._add("list_type", name, "Input should be a valid list")
        elif len(value) > most:
            message = f"List should have at most {most} items after validation, not {len(value)}"
            context = {"field_type": "List", "max_length": most, "actual_length": len(value)}
            self.problems.append(problem("too_long", f"body.{name}", message, value) | {"ctx": context})
        return ()

    def not_null(self, *names: str) -> None:
        """Fields that may be left out, but not be null."""
        for name in names:
            if name in self.body and self.body[name] is None:
                kind, what = ("int", "integer") if name in {"n", "min_tokens"} else ("bool", "boolean")
                self.problems.append(problem(f"{kind}_type", f"body.{name}", f"Input should be a valid {what}", None))

    def within(self, name: str, value: int | None, most: int) -> None:
        """An upper limit of the schema."""
        if value is not None and value > most:
            message = f"Input should be less than or equal to {most}"
            self.problems.append(problem("less_than_equal", f"body.{name}", message, value) | {"ctx": {"le": most}})

    def _add(self, kind: str, name: str, message: str, value: object = None) -> None:
        shown = self.body.get(name) if value is None else value
        self.problems.append(problem(kind, f"body.{name}", message, shown))
