"""Which flag sets which field.

The table is made from the specs: a field's flag is its name with dashes, a pool's fields get the stage in front. Only
names that users know from elsewhere are written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from pydantic import BaseModel

from disagg.topology.fields import Kind, SpecField, pool_stage, spec_fields
from disagg.topology.spec import Stage, Topology

_POOL_NAMES: Mapping[str, tuple[str, ...]] = {
    "device_groups": ("device-group", "device-groups"),
    "ports": ("port", "ports"),
    "parallel.tensor": ("tp", "tensor-parallel-size"),
    "parallel.pipeline": ("pp", "pipeline-parallel-size"),
    "parallel.data": ("dp", "data-parallel-size"),
    "parallel.expert": ("ep", "expert-parallel-size"),
    "parallel.context": ("cp", "context-parallel-size"),
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "router.workers": ("router-workers",),
    "dialect": ("dialect", "kv-dialect"),
    "link.dialect": ("kv-dialect", "link-dialect"),
    "link.side_channel_port": ("side-channel-port", "link-side-channel-port"),
    "link.handoff_port": ("kv-handoff-port", "kv-handOff-port", "handoff-port"),
    "link.handoff_store_mb": ("handoff-store-mb",),
    "link.handoff_store_entries": ("handoff-store-entries",),
    "block_size": ("block-size", "kv-block-size"),
    "max_seq_len_to_capture": ("max-seq-len-to-capture", "chunked-prefill-size"),
    "projection.anchors": ("anchors", "load-benchmark"),
    "projection.prefill_anchors": ("prefill-anchors", "prefill-benchmark"),
    "projection.decode_anchors": ("decode-anchors", "decode-benchmark"),
}
SIZING_SECTIONS = ("workload", "projection")
"""Sections that say nothing about a running deployment; only commands that size one take their flags."""
_PLAIN_SECTIONS = ("", "router", *SIZING_SECTIONS)
_SPREAD: Mapping[str, tuple[Stage, ...]] = {
    **{name: tuple(Stage) for name in _POOL_NAMES if name.startswith("parallel.")},
    "speculative_config": (Stage.DECODE, Stage.COLOCATED),
}
"""Fields that only pools have, but that a flag without a stage sets in all these pools."""

SHORT_FLAGS: Mapping[str, str] = MappingProxyType(
    {"-tp": "tp", "-pp": "pp", "-dp": "dp", "-q": "quantization", "-sc": "speculative-config"}
)
"""Short spellings that vLLM has for some of these flags."""

REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "kv-store-size": "has no known unit: some users of it count MB, others entries; give --handoff-store-mb or "
        "--handoff-store-entries"
    }
)
"""Flags that users know from elsewhere and that cannot be followed, with what to write instead."""


@dataclass(frozen=True, slots=True)
class FlagDef:
    """One flag.

    Attributes:
        names: Its spellings without leading dashes; the first is the one that help shows.
        field: The field that it sets; of a spread flag, that of one of its pools.
        path: Place of its value in the topology; for a spread flag, its place inside a pool.
        group: Heading under which help lists it.
        spread: Stages whose pools take the value unless they have their own.
    """

    names: tuple[str, ...]
    field: SpecField
    path: tuple[str, ...]
    group: str
    spread: tuple[Stage, ...] = ()

    @property
    def sizing(self) -> bool:
        """Whether it is for commands that size a deployment, and not for one that runs it."""
        return self.field.path.partition(".")[0] in SIZING_SECTIONS

    @property
    def many(self) -> bool:
        """Whether it takes all words up to the next flag."""
        return (
            self.field.kind in (Kind.PORTS, Kind.GROUPS, Kind.LIST, Kind.ENGINES)
            or self.field.name == "override_qaic_config"
        )

    @property
    def metavar(self) -> str:
        """What help shows in place of its value."""
        special = {"env": "NAME=VALUE", "override_qaic_config": "SETTINGS", "model": "MODEL"}
        if self.field.name in special:
            return special[self.field.name]
        if self.field.kind is Kind.CHOICE:
            return "{" + ",".join(self.field.choices) + "}"
        words = {
            Kind.INT: "N",
            Kind.FLOAT: "X",
            Kind.PORTS: "PORTS",
            Kind.GROUPS: "IDS",
            Kind.LIST: "NAME",
            Kind.ENGINES: "URL",
            Kind.MAP: "JSON",
        }
        return words.get(self.field.kind, "TEXT")


@cache
def flag_table(root: type[BaseModel] = Topology) -> tuple[FlagDef, ...]:
    """All flags, in the order of the fields that they set.

    Args:
        root: The model of the whole file.
    """
    table = [
        FlagDef(_names(f), f, tuple(f.path.split(".")), _group(f))
        for f in spec_fields(root).values()
        if f.kind is not Kind.SECTION and f.name != "engine_args"
    ]
    if root is not Topology:
        return tuple(table)
    for tail, stages in _SPREAD.items():
        field = spec_fields()[f"{stages[0]}.{tail}"]
        names = _POOL_NAMES.get(tail, (tail.replace("_", "-"),))
        table.append(FlagDef(names, field, tuple(tail.split(".")), "all stages", stages))
    return tuple(table)


@cache
def flags_by_name(root: type[BaseModel] = Topology) -> Mapping[str, FlagDef]:
    """Every spelling of every flag, without leading dashes.

    Args:
        root: The model of the whole file.

    Raises:
        ValueError: If two flags share a spelling, which is a mistake in the tables above.
    """
    known: dict[str, FlagDef] = {}
    for flag in flag_table(root):
        for name in flag.names:
            if name in known:
                raise ValueError(f"--{name} would set {known[name].field.path} and {flag.field.path}")
            known[name] = flag
    return MappingProxyType(known)


def flags_of(path: str, root: type[BaseModel] = Topology) -> tuple[str, ...]:
    """The flags that set a field, each with its dashes, the usual one first."""
    return tuple(f"--{n}" for f in flag_table(root) if not f.spread and f.field.path == path for n in f.names)


def _names(field: SpecField) -> tuple[str, ...]:
    stage = pool_stage(field.path)
    if stage is not None and field.kind is not Kind.ENGINES:
        tail = field.path.partition(".")[2]
        return tuple(f"{stage}-{n}" for n in _POOL_NAMES.get(tail, (tail.replace("_", "-"),)))
    if field.path in _NAMES:
        return _NAMES[field.path]
    section, _, tail = field.path.rpartition(".")
    plain = tail.replace("_", "-")
    # The router has no name in front: it is what a user talks to, and its fields are told apart by what they say. Nor
    # have the sections of a projection, whose flags users know without.
    return (plain,) if section in _PLAIN_SECTIONS else (f"{section.replace('_', '-')}-{plain}",)


def _group(field: SpecField) -> str:
    stage = pool_stage(field.path)
    if field.kind is Kind.ENGINES:
        return "engines"
    if stage is not None:
        return f"{stage} pool"
    section = field.path.partition(".")[0]
    groups = {
        "link": "KV transfer",
        "kv_store": "KV store",
        "router": "router",
        "workload": "workload",
        "projection": "projection",
    }
    if section in groups:
        return groups[section]
    shared = {f.name for f in spec_fields().values() if pool_stage(f.path)}
    return "all stages" if field.name in shared or field.name in ("seed", "generation_config") else "deployment"
