"""What every benchmark prints: a table for people, or with `--json` each figure with its unit, and the versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. Ratios are named `ratio_<figure>_vs_<peer>` and have the unit `1`."""

    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Report:
    """All figures of one run."""

    title: str
    packages: Sequence[str]
    figures: list[Figure] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    """Versions of what is compared with, where it is not installed beside this project."""
    notes: dict[str, str] = field(default_factory=dict)
    """What else a reader has to know about the run."""

    def add(self, name: str, value: float, unit: str) -> None:
        """Record a figure."""
        self.figures.append(Figure(name, value, unit))

    def median(self, name: str, values: Sequence[float], unit: str) -> float:
        """Record the median of repeated measurements and return it."""
        middle = statistics.median(values)
        self.add(name, middle, unit)
        return middle

    def versions(self) -> dict[str, str]:
        """Versions of Python, of this project and of the packages measured; `absent` if not installed."""
        found = {"python": platform.python_version()}
        for name in ("disagg", *self.packages):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "absent"
        return found | self.peers

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            print(
                json.dumps(
                    {
                        "benchmark": self.title,
                        "machine": {"cores": len(os.sched_getaffinity(0)), "architecture": platform.machine()},
                        "versions": self.versions(),
                        "notes": self.notes,
                        "figures": {f.name: {"value": f.value, "unit": f.unit} for f in self.figures},
                    },
                    indent=2,
                )
            )
            return
        table = Table(title=self.title)
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        for f in self.figures:
            shown = f"{f.value:,}" if isinstance(f.value, int) else f"{f.value:,.4g}"
            table.add_row(f.name, shown, f.unit)
        console = Console()
        console.print(table)
        console.print(", ".join(f"{k} {v}" for k, v in (self.versions() | self.notes).items()))


def arguments(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser
