"""Where each value of a topology came from.

A place in a topology is a dotted path such as ``prefill.ports`` or ``prefill.ports.1``. Problems carry such paths
while they are found; `Provenance.explain` turns them into the flag or the line that the user can change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel

from disagg.errors import Problem
from disagg.topology.flags import flags_of
from disagg.topology.spec import Topology


class OriginKind(StrEnum):
    """The kinds of places that a value can come from."""

    FLAG = "flag"
    FILE = "file"
    DEFAULT = "default"
    DERIVED = "derived"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value came from.

    Attributes:
        kind: What sort of place it is.
        text: The flag (``--prefill-port``), ``file:line``, or what a derived value follows from.
    """

    kind: OriginKind
    text: str = ""

    def __str__(self) -> str:
        match self.kind:
            case OriginKind.FLAG:
                return f"flag {self.text}"
            case OriginKind.FILE:
                return self.text
            case OriginKind.DERIVED:
                return f"derived from {self.text}"
            case OriginKind.DEFAULT:
                return "default"


DEFAULT = Origin(OriginKind.DEFAULT)


def dotted(path: Iterable[str | int]) -> str:
    """Write a path the way that problems and provenance name it."""
    return ".".join(str(part) for part in path)


def ancestors(path: str) -> Iterable[str]:
    """The path itself, then each shorter one, to the first word."""
    while path:
        yield path
        path = path.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origins of a topology's values.

    Attributes:
        values: Origin of each value that a flag or the file gave as a whole, by path.
        containers: Line of each mapping in the file, by path; not the origin of what is missing in it.
        root: The model of the whole file.
    """

    values: Mapping[str, Origin] = field(default_factory=dict)
    containers: Mapping[str, Origin] = field(default_factory=dict)
    root: type[BaseModel] = Topology

    def of(self, path: str) -> Origin:
        """Where the value at a path came from: a flag, a line of the file, or the default.

        A mapping that the file only adds to has the line where it begins.
        """
        if path in self.containers:
            return self.containers[path]
        return next((self.values[p] for p in ancestors(path) if p in self.values), DEFAULT)

    def where(self, path: str) -> str:
        """What a user has to look at to change the value at a path.

        A comma-separated list of paths gives a list of places.
        """
        return ", ".join(dict.fromkeys(self._where(p) for p in path.split(", ")))

    def _where(self, path: str) -> str:
        for part in ancestors(path):
            origin = self.values.get(part) or self.containers.get(part)
            if origin is not None:
                return origin.text if origin.kind is OriginKind.FLAG else f"{origin.text}: {path}"
        flags = flags_of(path, self.root)
        return f"{path} ({flags[0]})" if flags else path

    def explain(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same problems, each naming the flag or line that caused it instead of a path."""
        return [Problem(self.where(p.where), p.message) for p in problems]
