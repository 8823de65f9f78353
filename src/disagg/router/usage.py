"""Token counts out of an answer that passes by, without reading it as JSON."""

from __future__ import annotations

import re
from typing import NamedTuple

# Inside of a JSON string each quote has a backslash before it, so no text of a model can look like one of these keys.
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_USAGE = b'"usage"'


class Usage(NamedTuple):
    """What an answer says about its size, in tokens; 0 where it says nothing."""

    prompt: int
    completion: int
    cached: int


def find_usage(answer: bytes) -> Usage | None:
    """Find the usage in a whole answer, or in the last events of a stream; None if there is none."""
    start = answer.rfind(_USAGE)
    if start < 0:
        return None
    return Usage(
        _number(_PROMPT, answer, start), _number(_COMPLETION, answer, start), _number(_CACHED, answer, start)
    )


def _number(pattern: re.Pattern[bytes], answer: bytes, start: int) -> int:
    found = pattern.search(answer, start)
    return int(found[1]) if found is not None else 0
