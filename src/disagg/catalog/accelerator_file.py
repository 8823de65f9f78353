"""Reads the description of an accelerator: one of ours, or a file that the user wrote.

The file is YAML or JSON::

    vendor: Example
    sources: {sheet: "Example data sheet, 2026"}
    peak: {bf16: {value: 400TFLOP/s, source: sheet}}
    memory: {value: 64GB, source: sheet}
    bandwidth: 2TB/s
    scale_up: {bandwidth: 100GB/s, latency: 5us, efficiency: 0.8, devices: 8}

A figure is a value, or an object with `value`, and `source`, which may be one of the names under `sources`, and
`origin`. A bare value is the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from disagg.catalog.accelerator import Accelerator, CollectiveCurve, Fabric, Kernel
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.precision import Dtype
from disagg.catalog.quantity import Kind, parse_quantity
from disagg.errors import ConfigError, Problem

_KNOWN = {
    "name", "aliases", "vendor", "sources", "peak", "memory", "bandwidth", "scale_up", "scale_out", "host_link",
    "efficiency", "step_overhead", "launch", "kernel_floor", "watts", "collectives", "notes",
}  # fmt: skip
_COLLECTIVES = ("all_reduce", "custom_all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(slots=True)
class _Reader:
    """Reads parts of one description; collects problems."""

    where: str
    sources: Mapping[str, str]
    problems: list[Problem]

    def problem(self, path: str, message: str) -> None:
        self.problems.append(Problem(f"{self.where}: {path}", message))

    def mapping(self, value: object, path: str) -> Mapping[str, object]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problem(path, f"is {value!r}; it must be an object with fields of its own")
            return {}
        return {str(name): item for name, item in value.items()}

    def figure(self, value: object, path: str, kind: Kind) -> Figure | None:
        if value is None:
            return None
        source, origin = f"{self.where}: {path}", Origin.USER
        if isinstance(value, dict):
            for name in value.keys() - {"value", "source", "origin"}:
                self.problem(f"{path}.{name}", "is not known; a figure has value, source and origin")
            named = str(value.get("source", ""))
            source = self.sources.get(named, named) or source
            origin = self.word(value.get("origin", Origin.CATALOGUE), f"{path}.origin", Origin) or Origin.USER
            value = value.get("value")
        try:
            return Figure(parse_quantity(value, kind), origin, source)
        except ValueError as error:
            self.problem(path, str(error))
            return None

    def word(self, value: object, path: str, words: type[_Word]) -> _Word | None:
        try:
            return words(str(value))
        except ValueError:
            self.problem(path, f"is not known; choose from {', '.join(words)}")
            return None

    def required(self, value: object, path: str, kind: Kind) -> Figure:
        figure = self.figure(value, path, kind)
        if figure is None and value is None:
            self.problem(path, f"is missing; give {kind}")
        return figure or Figure(1.0, Origin.DEFAULT, "")

    def peaks(self, value: object) -> Mapping[Dtype, Figure]:
        peaks: dict[Dtype, Figure] = {}
        for name, item in self.mapping(value, "peak").items():
            dtype = self.word(name, f"peak.{name}", Dtype)
            figure = self.figure(item, f"peak.{name}", Kind.FLOPS)
            if dtype is not None and figure is not None:
                peaks[dtype] = figure
        if not peaks:
            self.problem(
                "peak", "is missing; give operations per second for one number format at least, such as bf16"
            )
        return peaks

    def efficiencies(self, value: object) -> Mapping[tuple[Kernel, Dtype], Figure]:
        found: dict[tuple[Kernel, Dtype], Figure] = {}
        for name, formats in self.mapping(value, "efficiency").items():
            kernel = self.word(name, f"efficiency.{name}", Kernel)
            for format_name, item in self.mapping(formats, f"efficiency.{name}").items():
                path = f"efficiency.{name}.{format_name}"
                dtype, figure = self.word(format_name, path, Dtype), self.figure(item, path, Kind.SHARE)
                if kernel is not None and dtype is not None and figure is not None:
                    found[kernel, dtype] = figure
        return found

    def fabric(self, value: object, path: str) -> Fabric | None:
        if value is None:
            return None
        fields = self.mapping(value, path)
        for name in fields.keys() - {"bandwidth", "latency", "efficiency", "devices"}:
            self.problem(f"{path}.{name}", "is not known; known are bandwidth, latency, efficiency, devices")
        devices = fields.get("devices")
        if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 2):
            self.problem(f"{path}.devices", f"is {devices!r}; it must be a whole number of at least 2")
            devices = None
        return Fabric(
            bandwidth=self.required(fields.get("bandwidth"), f"{path}.bandwidth", Kind.RATE),
            latency=self.required(fields.get("latency"), f"{path}.latency", Kind.SECONDS),
            devices=devices,
            efficiency=self.required(fields.get("efficiency"), f"{path}.efficiency", Kind.SHARE),
        )

    def collectives(self, value: object) -> Mapping[str, tuple[CollectiveCurve, ...]]:
        curves: dict[str, tuple[CollectiveCurve, ...]] = {}
        for name, item in self.mapping(value, "collectives").items():
            if name not in _COLLECTIVES:
                self.problem(f"collectives.{name}", f"is not known; choose from {', '.join(_COLLECTIVES)}")
                continue
            found = [self.curve(entry, f"collectives.{name}[{i}]") for i, entry in enumerate(self.items(item, name))]
            curves[name] = tuple(curve for curve in found if curve is not None)
        return curves

    def items(self, value: object, name: str) -> list[object]:
        if isinstance(value, list):
            return value
        self.problem(f"collectives.{name}", "must be a list of curves, one per number of devices")
        return []

    def curve(self, value: object, path: str) -> CollectiveCurve | None:
        fields = self.mapping(value, path)
        try:
            devices = int(str(fields["devices"]))
            sizes = tuple(parse_quantity(item, Kind.BYTES) for item in _listed(fields["sizes"]))
            seconds = tuple(parse_quantity(item, Kind.SECONDS) for item in _listed(fields["seconds"]))
        except KeyError as error:
            self.problem(path, f"lacks {error}; a curve has devices, sizes, seconds")
            return None
        except ValueError as error:
            self.problem(path, str(error))
            return None
        if len(sizes) != len(seconds) or not sizes or list(sizes) != sorted(set(sizes)) or devices < 2:
            self.problem(path, "needs two devices or more and as many seconds as sizes, sizes ascending")
            return None
        named = str(fields.get("source", ""))
        origin = self.word(fields.get("origin", Origin.CATALOGUE), f"{path}.origin", Origin) or Origin.USER
        return CollectiveCurve(devices, sizes, seconds, origin, self.sources.get(named, named) or self.where)


def _listed(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("needs sizes and seconds as lists")
    return value


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def accelerator_from(data: Mapping[str, object], *, name: str, where: str) -> Accelerator:
    """Turn a description into an accelerator.

    Args:
        data: Its fields.
        name: What it is called where it does not say.
        where: Where it is from; problems name it.

    Raises:
        ConfigError: If fields are missing, wrong or not known; names each.
    """
    reader = _Reader(where, {}, [])
    reader.sources = {key: str(text) for key, text in reader.mapping(data.get("sources"), "sources").items()}
    for field in data.keys() - _KNOWN:
        reader.problem(field, f"is not known; known are {', '.join(sorted(_KNOWN))}")
    accelerator = Accelerator(
        name=str(data.get("name") or name),
        aliases=_texts(data.get("aliases")),
        vendor=str(data.get("vendor") or "unknown"),
        peak=reader.peaks(data.get("peak")),
        memory=reader.required(data.get("memory"), "memory", Kind.BYTES),
        bandwidth=reader.required(data.get("bandwidth"), "bandwidth", Kind.RATE),
        scale_up=reader.fabric(data.get("scale_up"), "scale_up"),
        scale_out=reader.fabric(data.get("scale_out"), "scale_out"),
        host_link=reader.figure(data.get("host_link"), "host_link", Kind.RATE),
        efficiency=reader.efficiencies(data.get("efficiency")),
        step_overhead=reader.figure(data.get("step_overhead"), "step_overhead", Kind.SECONDS),
        launch=reader.figure(data.get("launch"), "launch", Kind.SECONDS),
        kernel_floor=reader.figure(data.get("kernel_floor"), "kernel_floor", Kind.SECONDS),
        watts=reader.figure(data.get("watts"), "watts", Kind.WATTS),
        collectives=reader.collectives(data.get("collectives")),
        notes=_texts(data.get("notes")),
    )
    if reader.problems:
        raise ConfigError(reader.problems)
    return accelerator
