"""What an adapter's check finds, one by one, and how it is handed back: errors and warnings, each once, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import JsonValue

from disagg.errors import Problem


class Finding(NamedTuple):
    """One problem, and whether it stops the start."""

    problem: Problem
    fatal: bool


Findings = Iterator[Finding]


def error(where: str, message: str) -> Finding:
    """A finding that stops the start."""
    return Finding(Problem(where, message), fatal=True)


def warning(where: str, message: str) -> Finding:
    """A finding that the user should know and may live with."""
    return Finding(Problem(where, message), fatal=False)


def split(findings: Iterable[Finding]) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings in the order found; what several instances share is told once."""
    errors: dict[Problem, None] = {}
    warnings: dict[Problem, None] = {}
    for finding in findings:
        (errors if finding.fatal else warnings)[finding.problem] = None
    return list(errors), list(warnings)


def shown(value: JsonValue) -> str:
    """A value as a message shows it: words bare, the rest as JSON, null as none."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
