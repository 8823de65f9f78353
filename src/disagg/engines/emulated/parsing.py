"""Takes a text apart into reasoning, content and a tool call, whole or as far as it has come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from disagg.engines.emulated.constraints import Constraint
from disagg.engines.emulated.script import CALL_ARGUMENTS, CALL_HEAD, CALL_TAIL, THINK_END


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer's parts.

    Attributes:
        reasoning: What comes before the answer.
        content: What is said to the user.
        tool: Name of the called function, None as long as there is no call.
        arguments: Its arguments as JSON, as far as they have come.
    """

    reasoning: str = ""
    content: str = ""
    tool: str | None = None
    arguments: str = ""


def parse(text: str, *, reasoning: bool, tools: bool, final: bool) -> Parsed:
    """Take a text apart.

    Args:
        text: What was generated so far.
        reasoning: It begins with reasoning.
        tools: It may be a tool call.
        final: Nothing more will come; else what may still become a marker is held back.
    """
    thought = ""
    if reasoning:
        at = text.find(THINK_END)
        if at < 0:
            return Parsed(reasoning=text if final else _without_partial(text, THINK_END))
        thought, text = text[:at], text[at + len(THINK_END) :].lstrip("\n")
    if not tools or not text.startswith(CALL_HEAD[: len(text)]):
        return Parsed(thought, text)
    at = text.find(CALL_ARGUMENTS)
    if at < 0:
        return Parsed(thought, text if final else "")
    arguments = text[at + len(CALL_ARGUMENTS) :]
    end = arguments.find(CALL_TAIL)
    arguments = arguments[:end] if end >= 0 else _without_partial(arguments, CALL_TAIL)
    return Parsed(thought, "", json.loads(text[len(CALL_HEAD) : at]), arguments)


def _without_partial(text: str, marker: str) -> str:
    """The text without an end that is the marker's beginning."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return text[:-length]
    return text


def call_id() -> str:
    """An id for a tool call, as vLLM makes them."""
    return f"chatcmpl-tool-{uuid4().hex[:16]}"


class StreamParts:
    """What is new of each part of one streamed choice, as deltas of a chat message."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._text = ""
        self.parsed = Parsed()

    def feed(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        """Deltas for more text."""
        self._text += text
        constraint, before = self._constraint, self.parsed
        now = parse(self._text, reasoning=constraint.reasons, tools=constraint.mode is not None, final=final)
        self.parsed = now
        out: list[dict[str, Any]] = []
        if len(now.reasoning) > len(before.reasoning):
            out.append({"reasoning": now.reasoning[len(before.reasoning) :]})
        if len(now.content) > len(before.content):
            out.append({"content": now.content[len(before.content) :]})
        if now.tool is not None and before.tool is None:
            call = {"id": call_id(), "type": "function", "index": 0, "function": {"name": now.tool}}
            out.append({"content": None, "tool_calls": [call]})
        if len(now.arguments) > len(before.arguments):
            call = {"index": 0, "function": {"arguments": now.arguments[len(before.arguments) :]}}
            out.append({"content": None, "tool_calls": [call]})
        return out
