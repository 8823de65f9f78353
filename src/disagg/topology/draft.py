"""A topology while it is being put together: plain values from the file and the flags, each with its origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, JsonValue

from disagg.errors import Problem
from disagg.topology.provenance import Origin, Provenance, dotted
from disagg.topology.spec import Stage, Topology
from disagg.topology.yaml_source import Document


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a flag gives.

    Attributes:
        path: Its place in the topology; for a spread setting, its place inside a pool.
        value: The value in one of the forms that the file accepts.
        origin: The flag.
        spread: Stages whose pools take the value unless they have their own; empty for a plain setting.
    """

    path: tuple[str, ...]
    value: JsonValue
    origin: Origin
    spread: tuple[Stage, ...] = ()


@dataclass(slots=True)
class Draft:
    """Values that are not checked yet, with where they came from.

    Attributes:
        data: Nested values as the file format has them.
        values: Origin of each value, by dotted path.
        containers: Origin of each mapping of the file, by dotted path.
        problems: What could not be put in its place.
        root: The model of the whole file.
    """

    data: dict[str, JsonValue] = field(default_factory=dict)
    values: dict[str, Origin] = field(default_factory=dict)
    containers: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    root: type[BaseModel] = Topology

    def provenance(self) -> Provenance:
        """The origins as they are now."""
        return Provenance(dict(self.values), dict(self.containers), self.root)

    def section(self, path: tuple[str, ...]) -> dict[str, JsonValue] | None:
        """The mapping at a path, or None if there is none."""
        here: JsonValue = self.data
        for part in path:
            if not isinstance(here, dict):
                return None
            here = here.get(part)
        return here if isinstance(here, dict) else None

    def put(self, path: tuple[str, ...], value: JsonValue, origin: Origin) -> None:
        """Set one value as a whole; its former parts and their origins are forgotten."""
        here = self.data
        for depth, part in enumerate(path[:-1], start=1):
            below = here.get(part)
            if below is None:
                below = here[part] = {}
            if not isinstance(below, dict):
                self.problems.append(
                    Problem(
                        origin.text,
                        f"sets a part of {dotted(path[:depth])}, which is given as one value and not as a mapping",
                    )
                )
                return
            here = below
        here[path[-1]] = value
        self.forget(dotted(path))
        self.values[dotted(path)] = origin

    def forget(self, path: str) -> None:
        """Drop the origins of a path and of everything below it."""
        for origins in (self.values, self.containers):
            for known in [k for k in origins if k == path or k.startswith(f"{path}.")]:
                del origins[known]


def merge(
    document: Document | None,
    settings: Sequence[Setting],
    root: type[BaseModel] = Topology,
    *,
    assume_pools: bool = False,
) -> Draft:
    """Lay flags over a file: a flag replaces the file's value in the same place, whatever it was.

    A spread setting comes last, and reaches only pools that exist and have no value of their own there.

    Args:
        document: The file, if there is one.
        settings: Values from flags.
        root: The model of the whole file.
        assume_pools: Give a topology without pools one of each that it means, as sizing needs no devices.
    """
    draft = Draft(root=root)
    if document is not None:
        draft.data = document.data
        draft.values.update(document.values)
        draft.containers.update(document.containers)
        draft.problems.extend(document.problems)
    for setting in settings:
        if not setting.spread:
            draft.put(setting.path, setting.value, setting.origin)
    if assume_pools:
        _assume_pools(draft)
    for setting in settings:
        for stage in setting.spread:
            pool = draft.section((stage.value,))
            inner = draft.section((stage.value, *setting.path[:-1])) or {}
            if pool is not None and setting.path[-1] not in inner:
                draft.put((stage.value, *setting.path), setting.value, setting.origin)
    return draft


def _assume_pools(draft: Draft) -> None:
    """Without any pool there is a colocated one; `disaggregate` makes it one of prefill and one of decode."""
    projection = draft.section(("projection",)) or {}
    wanted: tuple[Stage, ...] = ()
    if projection.get("disaggregate") is True:
        # An encode pool may stand before decode alone (xEyPD); otherwise decode needs a prefill pool.
        wanted = (Stage.DECODE,) if Stage.ENCODE.value in draft.data else (Stage.PREFILL, Stage.DECODE)
    elif not any(stage.value in draft.data for stage in Stage):
        wanted = (Stage.COLOCATED,)
    for stage in wanted:
        draft.data.setdefault(stage.value, {"replicas": 1})
