"""Short ways to make topologies for these tests."""

from __future__ import annotations

from typing import Any

from disagg.errors import ConfigError
from disagg.topology.load import LoadedTopology, load_topology
from disagg.topology.spec import Platform, Topology
from disagg.topology.yaml_source import read_yaml


def topology(**values: Any) -> Topology:
    """A 1P1D topology with the given values; give a pool as None to leave it out."""
    base: dict[str, Any] = {"model": "m", "prefill": {}, "decode": {}}
    merged = {**base, **values}
    return Topology.model_validate({key: value for key, value in merged.items() if value is not None})


def load(text: str, *, auto: Platform = Platform.CPU) -> LoadedTopology:
    """Load a topology from YAML text named t.yaml."""
    return load_topology(read_yaml(text, name="t.yaml"), auto=auto)


def problems(text: str, *, auto: Platform = Platform.CPU) -> list[str]:
    """What is wrong with a topology in YAML text, one line per problem; empty if nothing is."""
    try:
        load(text, auto=auto)
    except ConfigError as error:
        return [str(p) for p in error.problems]
    return []
