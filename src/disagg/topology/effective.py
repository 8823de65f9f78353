"""The value that holds for a stage: its pool's own, or the topology's field of the same name."""

from __future__ import annotations

from typing import Any

from disagg.topology.spec import Stage, Topology


def stage_value(topology: Topology, stage: Stage, name: str) -> Any:
    """The value of a field for all instances of a stage, None if neither the pool nor the topology sets it.

    Args:
        topology: The topology.
        stage: A stage; one without a pool has the topology's values.
        name: A field that pools have.
    """
    own = getattr(topology.pool(stage), name, None)
    return own if own is not None else getattr(topology, name, None)


def stage_path(topology: Topology, stage: Stage, name: str) -> str:
    """Where the value of `stage_value` stands: ``prefill.block_size``, or ``block_size`` if the pool sets none."""
    own = getattr(topology.pool(stage), name, None)
    return f"{stage}.{name}" if own is not None or not hasattr(topology, name) else name
