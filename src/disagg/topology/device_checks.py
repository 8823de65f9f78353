"""Do the device groups fit together? Overlaps, and groups against the parallel shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from pydantic import JsonValue

from disagg.errors import Problem
from disagg.topology.effective import stage_value
from disagg.topology.spec import ParallelShape, Platform, Pool, Stage, Topology
from disagg.units import format_id_group, parse_id_group

QAIC_CORES = 16
"""Cores of one Qualcomm device where the machine was not asked: AI 100 Pro and Ultra have as many."""
DEVICE_WORD: Mapping[Platform, str] = {
    Platform.CPU: "CPU core",
    Platform.CUDA: "CUDA device",
    Platform.ROCM: "HIP device",
    Platform.QAIC: "QID",
    Platform.EMULATED: "emulated device",
    Platform.AUTO: "device",
}


@dataclass(frozen=True, slots=True)
class Group:
    """One device group with the place that it was given in."""

    stage: Stage
    index: int
    ids: tuple[int, ...]

    @property
    def path(self) -> str:
        """Its place in the topology."""
        return f"{self.stage}.device_groups.{self.index}"

    @property
    def owner(self) -> str:
        """The instance that it belongs to."""
        return f"{self.stage}-{self.index}"


def device_groups(topology: Topology) -> tuple[Group, ...]:
    """All groups that are given, in the order of the stages."""
    return tuple(
        Group(stage, index, parse_id_group(text))
        for stage, pool in _pools(topology)
        for index, text in enumerate(pool.device_groups or ())
    )


def check_devices(topology: Topology, platform: Platform, *, cores: int = QAIC_CORES) -> list[Problem]:
    """Everything wrong between groups.

    Args:
        topology: The topology.
        platform: The platform, resolved.
        cores: Cores of one Qualcomm device.

    Returns:
        Overlaps, groups that do not fit the parallel shape, and pools that leave groups out while others have them.
    """
    groups = device_groups(topology)
    shape_problems = [p for group in groups for p in _shape(topology, group, platform)]
    return [*_overlaps(topology, groups, platform, cores), *shape_problems, *_missing(topology, groups, platform)]


def _overlaps(topology: Topology, groups: Sequence[Group], platform: Platform, cores: int) -> Iterator[Problem]:
    for first, second in combinations(groups, 2):
        shared = sorted(set(first.ids) & set(second.ids))
        if not shared:
            continue
        places = f"{first.path}, {second.path}"
        word = DEVICE_WORD[platform]
        what = f"{word}{'s' if len(shared) > 1 else ''} {format_id_group(shared)}"
        message = f"{first.owner} and {second.owner} both have {what}; a device belongs to one instance"
        if platform is not Platform.QAIC or Stage.COLOCATED in (first.stage, second.stage):
            yield Problem(places, message)
            continue
        used = [_cores(topology, group.stage) for group in (first, second)]
        if None in used:
            yield Problem(
                places, f"{message}, unless num_cores in override_qaic_config gives each a part of its {cores} cores"
            )
    if platform is Platform.QAIC:
        yield from _core_sums(topology, groups, cores)


def _core_sums(topology: Topology, groups: Sequence[Group], cores: int) -> Iterator[Problem]:
    """Devices on which several instances that name their cores ask for more than there are."""
    owners: dict[int, list[Group]] = {}
    for group in groups:
        for device in group.ids:
            owners.setdefault(device, []).append(group)
    too_many: dict[tuple[Group, ...], list[int]] = {}
    for device, sharing in owners.items():
        used = [_cores(topology, group.stage) for group in sharing]
        named = [n for n in used if n is not None]
        if len(sharing) > 1 and len(named) == len(used) and sum(named) > cores:
            too_many.setdefault(tuple(sharing), []).append(device)
    for sharing_groups, devices in too_many.items():
        parts = " + ".join(f"{g.owner} {_cores(topology, g.stage)}" for g in sharing_groups)
        yield Problem(
            ", ".join(g.path for g in sharing_groups),
            f"QID {format_id_group(sorted(devices))} would need {parts} cores, and has {cores}",
        )


def _cores(topology: Topology, stage: Stage) -> int | None:
    """Cores that an instance takes on each of its devices, its draft model's included; None if that is not said."""
    target = _number(stage_value(topology, stage, "override_qaic_config"), "num_cores")
    speculation = stage_value(topology, stage, "speculative_config")
    draft = speculation.get("draft_override_qaic_config") if isinstance(speculation, dict) else None
    extra = _number(draft, "num_cores") if isinstance(draft, dict) else 0
    return None if target is None or extra is None else target + extra


def _number(config: Mapping[str, JsonValue] | None, key: str) -> int | None:
    for name, value in (config or {}).items():
        if name.strip().lower().replace("-", "_") in (key, f"aic_{key}"):
            text = str(value)
            return int(text) if text.isdecimal() and len(text) < 6 and not isinstance(value, bool) else None
    return None


def _shape(topology: Topology, group: Group, platform: Platform) -> Iterator[Problem]:
    pool = topology.pool(group.stage)
    shape = pool.parallel if pool is not None else ParallelShape()
    world = shape.tensor * shape.pipeline * shape.data
    have = len(group.ids)
    factors = f"tensor {shape.tensor} x pipeline {shape.pipeline} x data {shape.data}"
    places = f"{group.path}, {group.stage}.parallel"
    word = DEVICE_WORD[platform]
    if platform in (Platform.CUDA, Platform.ROCM) and have != world:
        yield Problem(
            places,
            f"{group.owner} has {have} {word}{'s' if have != 1 else ''}, but its shape uses {world} ({factors}); "
            f"give --{group.stage}-tp and its kin, or another group",
        )
    if platform is Platform.QAIC and have % world:
        yield Problem(places, f"{group.owner} has {have} QIDs, which {world} ranks ({factors}) cannot share evenly")
    if platform is Platform.CPU and have < world:
        yield Problem(
            places, f"{group.owner} has {have} CPU cores for {world} ranks ({factors}); give it one per rank"
        )


def _missing(topology: Topology, groups: Sequence[Group], platform: Platform) -> Iterator[Problem]:
    """A pool without groups beside one with groups would run on devices that another instance owns."""
    if platform is Platform.EMULATED:
        return
    owned = {group.stage for group in groups}
    for stage, _ in _pools(topology):
        if owned and stage not in owned:
            others = ", ".join(sorted(owned))
            yield Problem(
                f"{stage}.device_groups",
                f"{stage} has no device groups while {others} has; give --{stage}-device-group, or none anywhere",
            )


def _pools(topology: Topology) -> Iterator[tuple[Stage, Pool]]:
    for stage in topology.stages():
        pool = topology.pool(stage)
        if pool is not None:
            yield stage, pool


def repeated(items: Sequence[str]) -> list[str]:
    """What stands more than once in a list, sorted."""
    return sorted({a for a, b in pairwise(sorted(items)) if a == b})
