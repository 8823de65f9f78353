"""All figures of an accelerator in one list, by the names that files and flags use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagg.catalog.accelerator import Accelerator, CollectiveCurve, Fabric
from disagg.catalog.figure import Figure
from disagg.catalog.quantity import Kind


@dataclass(frozen=True, slots=True)
class NamedFigure:
    """One figure.

    Attributes:
        path: Its name: memory, peak.bf16, efficiency.gemm.fp8, scale_up.bandwidth ...
        figure: The number and where it is from.
        kind: What it measures.
    """

    path: str
    figure: Figure
    kind: Kind


def figures(accelerator: Accelerator) -> tuple[NamedFigure, ...]:
    """Figures that an accelerator has, in the order of its fields. Collectives are left out."""
    return tuple(_figures(accelerator))


def _figures(accelerator: Accelerator) -> Iterator[NamedFigure]:
    for dtype, peak in accelerator.peak.items():
        yield NamedFigure(f"peak.{dtype}", peak, Kind.FLOPS)
    yield NamedFigure("memory", accelerator.memory, Kind.BYTES)
    yield NamedFigure("bandwidth", accelerator.bandwidth, Kind.RATE)
    yield from _fabric("scale_up", accelerator.scale_up)
    yield from _fabric("scale_out", accelerator.scale_out)
    for (kernel, dtype), share in accelerator.efficiency.items():
        yield NamedFigure(f"efficiency.{kernel}.{dtype}", share, Kind.SHARE)
    single = (
        ("host_link", accelerator.host_link, Kind.RATE),
        ("step_overhead", accelerator.step_overhead, Kind.SECONDS),
        ("launch", accelerator.launch, Kind.SECONDS),
        ("kernel_floor", accelerator.kernel_floor, Kind.SECONDS),
        ("watts", accelerator.watts, Kind.WATTS),
    )
    for path, figure, kind in single:
        if figure is not None:
            yield NamedFigure(path, figure, kind)


def _fabric(path: str, fabric: Fabric | None) -> Iterator[NamedFigure]:
    if fabric is not None:
        yield NamedFigure(f"{path}.bandwidth", fabric.bandwidth, Kind.RATE)
        yield NamedFigure(f"{path}.latency", fabric.latency, Kind.SECONDS)
        yield NamedFigure(f"{path}.efficiency", fabric.efficiency, Kind.SHARE)


def description(accelerator: Accelerator) -> dict[str, object]:
    """The description of an accelerator as a file has it; reading it gives the same accelerator."""
    data: dict[str, object] = {
        "name": accelerator.name,
        "aliases": list(accelerator.aliases),
        "vendor": accelerator.vendor,
    }
    for named in figures(accelerator):
        level = data
        *above, last = named.path.split(".")
        for name in above:
            level = level.setdefault(name, {})  # type: ignore[assignment]
        level[last] = {
            "value": named.figure.value,
            "source": named.figure.source,
            "origin": str(named.figure.origin),
        }
    for path, fabric in (("scale_up", accelerator.scale_up), ("scale_out", accelerator.scale_out)):
        if fabric is not None and fabric.devices is not None:
            data[path] |= {"devices": fabric.devices}  # type: ignore[operator]
    if accelerator.collectives:
        data["collectives"] = {
            name: [_curve(curve) for curve in curves] for name, curves in accelerator.collectives.items()
        }
    data["notes"] = list(accelerator.notes)
    return data


def _curve(curve: CollectiveCurve) -> dict[str, object]:
    return {
        "devices": curve.devices,
        "sizes": list(curve.sizes),
        "seconds": list(curve.seconds),
        "source": curve.source,
        "origin": str(curve.origin),
    }
