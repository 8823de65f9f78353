"""What must be equal between a disaggregated answer and one of an aggregated engine, and what may differ."""

from __future__ import annotations

from typing import Any

from tests.support.wire import Answer

_LOGPROB_TOLERANCE = 1e-3
_OWN = {"id", "created", "system_fingerprint"}
"""Different from request to request on one and the same engine."""


def comparable(answer: Answer, *, streamed: bool) -> object:
    """An answer without what differs between any two requests; raises if its framing is wrong."""
    assert answer.status == 200, answer.body[:500]
    if not streamed:
        return _without_own(answer.json())
    events = answer.events()
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = events[:-1]
    assert len({c["id"] for c in chunks}) == 1, "one id per stream"
    return {
        "text": "".join(_text(c) for c in chunks),
        "finish": [
            c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]
        ],
        "usage": [c["usage"] for c in chunks if c.get("usage")],
        "usage_last": bool(chunks[-1].get("usage")) and chunks[-1]["choices"] == [],
        "keys": sorted({k for c in chunks for k in c}),
        "first": _without_own(chunks[0]) if chunks[0]["choices"] and "delta" in chunks[0]["choices"][0] else None,
    }


def same(ours: object, theirs: object) -> bool:
    """Equal, but for the last digits of numbers that are not whole: one more or less in a batch changes them."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= _LOGPROB_TOLERANCE
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours == theirs


def _text(chunk: dict[str, Any]) -> str:
    if not chunk["choices"]:
        return ""
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def _without_own(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in _OWN}
