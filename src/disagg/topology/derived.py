"""What follows from a topology without being written in it, and from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from disagg.topology.effective import stage_value
from disagg.topology.fields import children
from disagg.topology.instances import Instance
from disagg.topology.load import LoadedTopology
from disagg.topology.provenance import Origin, OriginKind
from disagg.topology.spec import Platform, Pool, Stage


def derived_values(loaded: LoadedTopology, instances: Sequence[Instance]) -> dict[str, tuple[JsonValue, Origin]]:
    """Values of fields that were not given, by path, each with what it follows from.

    Args:
        loaded: The topology.
        instances: Its plan, from `plan_instances`.
    """
    found: dict[str, tuple[JsonValue, Origin]] = {}
    if loaded.topology.platform is Platform.AUTO:
        found["platform"] = loaded.platform.value, _from("this machine")
    for stage in loaded.topology.stages():
        pool = loaded.topology.pool(stage)
        if pool is not None:
            mine = [i for i in instances if i.stage is stage]
            found.update(_layout(stage, pool, mine))
            found.update(_inherited(loaded, stage, pool))
    return found


def _layout(stage: Stage, pool: Pool, mine: Sequence[Instance]) -> Mapping[str, tuple[JsonValue, Origin]]:
    found: dict[str, tuple[JsonValue, Origin]] = {}
    if pool.replicas is None:
        sources = [f"{stage}.{name}" for name in ("device_groups", "ports") if getattr(pool, name) is not None]
        origin = _from(sources[0]) if sources else Origin(OriginKind.DEFAULT)
        found[f"{stage}.replicas"] = len(mine), origin
    if pool.ports is None:
        found[f"{stage}.ports"] = [i.port for i in mine], _from("the default first port of the stage")
    return found


def _inherited(loaded: LoadedTopology, stage: Stage, pool: Pool) -> Mapping[str, tuple[JsonValue, Origin]]:
    """Fields that take the topology's value; engine flags and variables add up instead, so they are not listed."""
    shared = [n for n in children(stage.value) if n in children("") and n not in ("engine_args", "env")]
    return {
        f"{stage}.{name}": (stage_value(loaded.topology, stage, name), _from(name))
        for name in shared
        if getattr(pool, name) is None and stage_value(loaded.topology, stage, name) is not None
    }


def _from(text: str) -> Origin:
    return Origin(OriginKind.DERIVED, text)
