"""What `--dry-run` prints: every process that would start, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from disagg.engines.base import PlannedProcess
from disagg.errors import Problem
from disagg.serve.deployment import Deployment
from disagg.topology.secrets import HIDDEN, is_secret, masked_words
from disagg.units import printable


def render_json(deployment: Deployment, warnings: Sequence[Problem] = ()) -> str:
    """The plan as JSON; values of secret variables are not in it.

    Args:
        deployment: What would start.
        warnings: What checks of the topology had to say.
    """
    plan = {
        "shape": deployment.shape,
        "platform": deployment.topology.platform,
        "model": deployment.model,
        "served_model_names": deployment.served_model_names,
        "endpoint": deployment.url,
        "processes": [_fields(process) for process in deployment.processes],
        "warnings": _warnings(deployment, warnings),
    }
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def render_table(deployment: Deployment, warnings: Sequence[Problem] = ()) -> RenderableType:
    """The plan for people: commands can be pasted into a shell.

    Args:
        deployment: What would start.
        warnings: What checks of the topology had to say.
    """
    count = len(deployment.processes)
    title = f"{deployment.shape} of {deployment.served_model_names[0]} on {deployment.topology.platform}"
    parts: list[Text] = [Text(f"{title}: {count} processes behind {deployment.url}; nothing was started", "bold")]
    for number, process in enumerate(deployment.processes, 1):
        parts.append(Text(f"\n{number}. {process.name}", "bold cyan"))
        parts += _lines(process)
    said = _warnings(deployment, warnings)
    if said:
        parts.append(Text("\nwarnings", "bold yellow"))
        parts += [Text(f"  - {line}", "yellow") for line in said]
    return Group(*parts)


def _lines(process: PlannedProcess) -> list[Text]:
    facts = {
        "devices": process.devices,
        "cores": "" if process.cores is None else ",".join(map(str, process.cores)),
        "ports": ", ".join(f"{purpose} {port}" for purpose, port in process.ports.items()),
        "after": ", ".join(process.depends_on),
        "unset": " ".join(process.unset_env),
    }
    lines = [_fact(title, value) for title, value in facts.items() if value]
    lines += [_fact("env", f"{name}={shlex.quote(value)}") for name, value in _shown_env(process).items()]
    lines.append(_fact("command", shlex.join(masked_words(process.argv))))
    lines += [_fact("note", note) for note in process.notes]
    return lines


def _fact(title: str, value: str) -> Text:
    return Text.assemble((f"   {title:<8} ", "dim"), printable(value))


def _fields(process: PlannedProcess) -> dict[str, object]:
    return {
        "name": process.name,
        "argv": masked_words(process.argv),
        "command": shlex.join(masked_words(process.argv)),
        "env": _shown_env(process),
        "unset_env": process.unset_env,
        "cores": process.cores,
        "devices": process.devices,
        "ports": process.ports,
        "depends_on": process.depends_on,
        "notes": process.notes,
    }


def _shown_env(process: PlannedProcess) -> dict[str, str]:
    return {name: HIDDEN if is_secret(name) else value for name, value in sorted(process.env.items())}


def _warnings(deployment: Deployment, warnings: Sequence[Problem]) -> list[str]:
    return [*(str(problem) for problem in warnings), *deployment.warnings]
