"""As much of PromQL as it takes to know which metrics and labels a query names."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FUNCTIONS = frozenset({
    "sum", "min", "max", "count", "rate", "increase", "histogram_quantile", "count_over_time", "avg", "topk",
})  # fmt: skip
_WORDS = frozenset({"by", "without", "on", "ignoring", "and", "or", "unless", "offset", "bool"})
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_LABEL = re.compile(r"\s*(\w+)\s*(?:=~|!~|!=|=)\s*\"(?:[^\"\\]|\\.)*\"\s*,?")


@dataclass(frozen=True)
class Query:
    """What a query names.

    Attributes:
        selectors: Each metric with the labels that it is selected by.
        grouping: Labels that results are grouped by.
    """

    selectors: tuple[tuple[str, frozenset[str]], ...]
    grouping: frozenset[str]


def read_query(expr: str) -> Query:
    """Read a query; what is not understood fails the test."""
    assert expr.count("(") == expr.count(")"), expr
    grouping = frozenset(label.strip() for group in _GROUPING.findall(expr) for label in group.split(","))
    rest = _GROUPING.sub(" ", expr)
    rest = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", " ", rest)
    selectors = []
    for match in _SELECTOR.finditer(rest):
        name, labels = match.groups()
        if name in _WORDS or re.fullmatch(r"e\d+", name):
            continue
        if name in _FUNCTIONS:
            assert re.match(r"\s*\(", rest[match.end() :]), f"{name} is called in {expr}"
            continue
        pairs = _LABEL.findall(labels or "")
        assert not labels or _LABEL.sub("", labels).strip() == "", f"labels {labels!r} in {expr}"
        selectors.append((name, frozenset(pairs)))
    assert selectors, f"no metric in {expr}"
    return Query(tuple(selectors), grouping)
