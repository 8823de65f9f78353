"""The JSON Schema of the file format, made from the specs and shipped beside them for editors and other tools."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from disagg.topology.spec import Topology

FILE_NAME = "topology.schema.json"


def shipped_schema() -> str:
    """The text of the schema that belongs to this version."""
    return (files("disagg.topology") / FILE_NAME).read_text(encoding="utf-8")


def make_schema() -> str:
    """The schema as the specs have it now."""
    schema = _tidy(Topology.model_json_schema(mode="validation"))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "disagg topology"}
    return json.dumps({**head, **{k: v for k, v in schema.items() if k != "title"}}, indent=2) + "\n"


def _tidy(node: Any) -> Any:
    """Put descriptions on one line and drop titles that only repeat a key."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, Any] = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        tidy[key] = " ".join(value.split()) if key == "description" and isinstance(value, str) else _tidy(value)
    return tidy
