"""Answers that have to have a shape: a tool call, JSON of a schema, one of some choices, reasoning before the text.

The text is made when the first token is sampled, from the KV that was read for it, so it is as deterministic as any
other answer and as wrong as any other if the KV was. It is said token by token, and cut by the same limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.engines.emulated.model import EOS, MASK, WORDS, Tokenizer, mix

THINK_END = "</think>"
CALL_HEAD = '<tool_call>\n{"name": '
CALL_ARGUMENTS = ', "arguments": '
CALL_TAIL = "}\n</tool_call>"
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_MAX_DEPTH = 12


@dataclass(frozen=True, slots=True)
class Script:
    """What an answer has to say.

    Attributes:
        tokenizer: Turns it into tokens.
        say: The text, from the KV that the first token is sampled from; None leaves it to the model.
        reasons: Begin with some words of reasoning.
    """

    tokenizer: Tokenizer
    say: Callable[[int], str] | None
    reasons: bool = False

    def tokens(self, context: int) -> list[int]:
        """The tokens to say, with the end of the sequence if the text is whole."""
        out: list[int] = []
        if self.reasons:
            out += [WORDS[mix(context + n + 1) % len(WORDS)] for n in range(3 + mix(context) % 6)]
            out += self.tokenizer.encode(THINK_END + "\n\n")
        if self.say is not None:
            out += self.tokenizer.encode(self.say(context))
            out.append(EOS)
        return out


def word(seed: int) -> str:
    """A short word."""
    number = mix(seed & MASK)
    return "bdfghklmnprstvwz"[number % 16] + "aeiou"[number // 16 % 5] + "bdfghklmnprstvwz"[number // 80 % 16]


def tool_call(name: str, schema: Mapping[str, Any] | None, seed: int) -> str:
    """A call of a function with minimal arguments that fit its schema."""
    arguments = json.dumps(example(schema or {"type": "object"}, seed))
    return f"{CALL_HEAD}{json.dumps(name)}{CALL_ARGUMENTS}{arguments}{CALL_TAIL}"


def check_schema(schema: object) -> str | None:
    """What is wrong with a JSON schema, None if nothing that matters here is."""
    if isinstance(schema, dict):
        kinds = schema.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, str) and kind not in _TYPES:
                return f"Invalid type: {kind}"
        nested = [*_values(schema.get("properties")), *_values(schema.get("$defs")), schema.get("items")]
        for name in ("anyOf", "oneOf", "allOf"):
            part = schema.get(name)
            nested += part if isinstance(part, list) else []
        return next((found for item in nested if (found := check_schema(item)) is not None), None)
    return None


def _values(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else []


def example(schema: object, seed: int, root: Mapping[str, Any] | None = None, depth: int = 0) -> object:
    """A small value that fits a JSON schema: required properties only, shortest lists.

    Patterns and formats of strings are not heeded.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {}
    root = schema if root is None else root
    if "$ref" in schema:
        return example(_resolve(str(schema["$ref"]), root), seed, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return choices[mix(seed & MASK) % len(choices)]
    for name in ("anyOf", "oneOf", "allOf"):
        if options := schema.get(name):
            return example(options[0], seed, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind is None:
        kind = "object" if "properties" in schema else "string" if schema else "object"
    return _typed(str(kind), schema, seed, root, depth)


def _typed(kind: str, schema: Mapping[str, Any], seed: int, root: Mapping[str, Any], depth: int) -> object:
    match kind:
        case "string":
            text = word(seed)
            while len(text) < schema.get("minLength", 0):
                text += word(seed + len(text))
            return text[: max(schema.get("maxLength", len(text)), schema.get("minLength", 0))]
        case "integer" | "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            high = schema.get("maximum", schema.get("exclusiveMaximum", low + 10) - 1)
            return low + mix(seed & MASK) % (int(high - low) + 1) if high >= low else low
        case "boolean":
            return bool(mix(seed & MASK) & 1)
        case "null":
            return None
        case "array":
            count = schema.get("minItems", 0)
            return [example(schema.get("items", {}), seed + n + 1, root, depth + 1) for n in range(count)]
        case _:
            properties = schema.get("properties", {})
            return {
                name: example(properties.get(name, {"type": "string"}), seed + n + 1, root, depth + 1)
                for n, name in enumerate(schema.get("required", []))
            }


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
