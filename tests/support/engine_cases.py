"""Topologies and start contexts for tests of the engine adapters."""

from __future__ import annotations

from typing import Any

from disagg.engines.base import StartContext
from disagg.topology.instances import Instance, plan_instances
from disagg.topology.spec import Platform, Topology

CONTEXT = StartContext(
    model="/models/tiny",
    served_model_names=("tiny", "tiny-alias"),
    incarnation="prefill-0-1a2b3c",
    run_dir="/run/disagg/prefill-0",
)


def pair(platform: Platform = Platform.CPU, **fields: Any) -> Topology:
    """One prefill and one decode instance on a device each; fields replace or extend the topology's own."""
    values: dict[str, Any] = {
        "model": "/models/tiny",
        "platform": platform,
        "prefill": {"device_groups": ["0"]},
        "decode": {"device_groups": ["1"]},
    }
    for name, value in fields.items():
        own = values.get(name)
        values[name] = {**own, **value} if isinstance(own, dict) and isinstance(value, dict) else value
    return Topology.model_validate(values)


def instance(topology: Topology, name: str) -> Instance:
    """The planned instance of this name."""
    return next(i for i in plan_instances(topology) if i.name == name)


def value_of(argv: tuple[str, ...], flag: str) -> str:
    """The word after a flag that has to be there exactly once."""
    assert argv.count(flag) == 1, f"{flag} stands {argv.count(flag)} times in {argv}"
    return argv[argv.index(flag) + 1]
