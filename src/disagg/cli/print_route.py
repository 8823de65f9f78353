"""`disagg route --print-config` and `--dry-run`: the fleet file, and what would be routed where."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import JsonValue

from disagg.cli.print_config import flow
from disagg.topology.fields import Kind, SpecField, children, spec_fields
from disagg.topology.fleet_file import FleetFile, LoadedFleet, name_endpoints
from disagg.topology.secrets import masked

_FIELDS = spec_fields(FleetFile)


def route_yaml(loaded: LoadedFleet) -> str:
    """The fleet as a file: what was given with its source, defaults as comments, secrets hidden."""
    lines = ["# disagg route. Lines in comments are defaults."]
    lines.extend(_section(loaded, "", given(loaded)))
    return "\n".join(lines) + "\n"


def route_json(loaded: LoadedFleet) -> str:
    """The fleet as JSON: what was given, and where each value came from."""
    sources = {path: str(origin) for path, origin in sorted(loaded.provenance.values.items())}
    return json.dumps({"fleet": given(loaded), "sources": sources}, indent=2, ensure_ascii=False) + "\n"


def given(loaded: LoadedFleet) -> dict[str, JsonValue]:
    """What was given, as the file has it; nothing that is a default, and no secret."""
    values: dict[str, JsonValue] = loaded.file.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return {key: masked(key, value) for key, value in values.items()}


def plan_lines(file: FleetFile) -> list[str]:
    """What `--dry-run` says: the endpoint, and every engine with its name."""
    lines = [f"{', '.join(file.names)} over {file.engine} engines that speak {file.spoken}; nothing was started"]
    lines.append(f"  endpoint   http://{f'[{file.host}]' if ':' in file.host else file.host}:{file.port}")
    if file.router.admin_port is not None:
        lines.append(f"  admin      http://{file.router.admin_host}:{file.router.admin_port}")
    for stage in file.stages():
        endpoints = file.endpoints(stage)
        names = name_endpoints(stage, endpoints, {})
        lines += [f"  {stage:<10} {names[e.url]} at {e.url}" for e in endpoints]
    return lines


def _section(loaded: LoadedFleet, path: str, values: dict[str, JsonValue]) -> Iterator[str]:
    pad = "  " * (path.count(".") + 1 if path else 0)
    for name in children(path, FleetFile):
        field = _FIELDS[f"{path}.{name}" if path else name]
        value = values.get(name)
        if field.kind is Kind.SECTION:
            inner = value if isinstance(value, dict) else {}
            yield f"{pad}{name}:" if inner else f"{pad}# {name}:"
            yield from _section(loaded, field.path, inner)
        elif name in values:
            yield f"{pad}{name}: {flow(value)}  # {_source(loaded, field)}"
        elif field.default not in (None, (), {}):
            yield f"{pad}# {name}: {flow(_plain(field.default))}  # default"


def _plain(value: object) -> JsonValue:
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _source(loaded: LoadedFleet, field: SpecField) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(loaded.provenance.of(field.path)))
