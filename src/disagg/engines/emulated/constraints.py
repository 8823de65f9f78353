"""What a request demands of the shape of its answer: tools, structured output, reasoning. Checked as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from disagg.engines.emulated.fields import problem, rejected, schema_error
from disagg.engines.emulated.model import Tokenizer, mix
from disagg.engines.emulated.script import Script, check_schema, example, tool_call, word
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import BadRequestError

ToolMode = Literal["auto", "required", "named"]
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The shape of an answer.

    Attributes:
        mode: How tools may or have to be called; None parses no call.
        reasons: The answer begins with reasoning.
        script: What the answer says; None leaves it to the model.
    """

    mode: ToolMode | None = None
    reasons: bool = False
    script: Script | None = None

    @property
    def parses(self) -> bool:
        """The text has to be taken apart."""
        return self.reasons or self.mode is not None


FREE = Constraint()


def read_constraint(
    body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer, *, chat: bool
) -> Constraint:
    """Check what the body demands.

    Raises:
        BadRequestError: If it is contradictory, or more than this engine can do.
    """
    reasons = chat and settings.reasoning_parser is not None and body.get("include_reasoning") is not False
    mode = _tool_mode(body, settings) if chat else None
    say = _say_tool(body, mode) if mode is not None else None
    shaped = _structured(body)
    if say is None:
        say = shaped
    if say is None and not reasons:
        return Constraint(mode) if mode is not None else FREE
    return Constraint(mode, reasons, Script(tokenizer, say, reasons))


def _tool_mode(body: Mapping[str, Any], settings: EngineSettings) -> ToolMode | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list) and not tools:
        raise rejected(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    if choice not in (None, "none") and not tools:
        raise rejected("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if not tools:
        return None
    names = _tool_names(tools)
    if isinstance(choice, str) and choice not in {"none", "auto", "required"}:
        raise rejected(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" '
            "are supported.",
            "tool_choice",
        )
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or function.get("name") not in names:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise rejected(message, "tool_choice")
    if choice == "none":
        return None
    if choice in (None, "auto"):
        if not settings.auto_tool_choice or settings.tool_call_parser is None:
            raise BadRequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        return "auto"
    if settings.tool_call_parser is None:
        shown = json.dumps(choice) if isinstance(choice, str) else choice
        raise BadRequestError(f"tool_choice={shown} requires --tool-call-parser to be set")
    return "required" if choice == "required" else "named"


def _tool_names(tools: object) -> list[str]:
    if not isinstance(tools, list):
        raise schema_error(problem("list_type", "body.tools", "Input should be a valid list", tools))
    names = []
    for index, tool in enumerate(tools):
        where = f"body.tools.{index}.function"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise schema_error(problem("missing", where, "Field required", tool))
        if not isinstance(function.get("name"), str):
            raise schema_error(problem("missing", f"{where}.name", "Field required", function))
        names.append(function["name"])
    return names


def _say_tool(body: Mapping[str, Any], mode: ToolMode) -> Callable[[int], str] | None:
    """The call to make. With "auto" a conversation that ends with a tool's result is answered in words."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if mode == "auto" and isinstance(last, dict) and last.get("role") == "tool":
        return None
    functions = [tool["function"] for tool in body["tools"]]
    if mode == "named":
        name = body["tool_choice"]["function"]["name"]
        functions = [function for function in functions if function["name"] == name]

    def say(context: int) -> str:
        function = functions[mix(context) % len(functions)]
        return tool_call(function["name"], function.get("parameters"), context)

    return say


def _structured(body: Mapping[str, Any]) -> Callable[[int], str] | None:
    """The text that fits `response_format` or `structured_outputs`."""
    form = body.get("response_format")
    schema: object = None
    if isinstance(form, dict):
        kind = form.get("type")
        if kind not in {"text", "json_object", "json_schema", "structural_tag"}:
            message = "Input should be 'text', 'json_object' or 'json_schema'"
            raise schema_error(problem("literal_error", "body.response_format.type", message, kind))
        if kind == "structural_tag":
            raise BadRequestError("The emulated engine does not support structural tags.", param="response_format")
        if kind == "json_object":
            schema = {"type": "object", "required": ["text"]}
        elif kind == "json_schema":
            outer = form.get("json_schema")
            if not isinstance(outer, dict):
                message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
                raise rejected(message, "response_format")
            schema = outer.get("schema") or {"type": "object"}
    given = body.get("structured_outputs")
    if isinstance(given, dict):
        present = [kind for kind in _KINDS if given.get(kind) is not None]
        if len(present) > 1:
            raise BadRequestError(
                "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
            )
        if present:
            return _constrained(present[0], given[present[0]])
    return _json(schema) if schema is not None else None


def _constrained(kind: str, value: object) -> Callable[[int], str]:
    if kind == "choice" and isinstance(value, list) and value:
        words = [str(item) for item in value]
        return lambda context: words[mix(context) % len(words)]
    if kind == "json_object":
        return _json({"type": "object", "required": ["text"]})
    if kind == "json":
        try:
            return _json(json.loads(value) if isinstance(value, str) else value)
        except ValueError as error:
            raise BadRequestError(f"Grammar error: {error}") from error
    raise BadRequestError(f"The emulated engine does not support {kind} constraints.", param="structured_outputs")


def _json(schema: object) -> Callable[[int], str]:
    wrong = check_schema(schema)
    if wrong is not None:
        raise BadRequestError(f"Grammar error: {wrong}")

    def say(context: int) -> str:
        return json.dumps(example(schema, context)) if schema else json.dumps({word(context): 1})

    return say
