"""Single figures of an accelerator that the user knows better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from disagg.catalog.accelerator import Accelerator, Fabric, Kernel
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.precision import Dtype
from disagg.catalog.quantity import Kind, parse_quantity
from disagg.errors import ConfigError, Problem

_SINGLE = {
    "memory": Kind.BYTES,
    "bandwidth": Kind.RATE,
    "host_link": Kind.RATE,
    "step_overhead": Kind.SECONDS,
    "launch": Kind.SECONDS,
    "kernel_floor": Kind.SECONDS,
    "watts": Kind.WATTS,
}
_FABRIC = {"bandwidth": Kind.RATE, "latency": Kind.SECONDS, "efficiency": Kind.SHARE}
_ALL = ", ".join((*_SINGLE, "peak.*", "efficiency.*", "scale_up.*", "scale_out.*"))
_NODES = "send and receive of two H100 nodes in the tables of microsoft/vidur"
# What a link between nodes is like where the user gives its bandwidth only.
_LATENCY = Figure(17e-6, Origin.DEFAULT, _NODES)
_EFFICIENCY = Figure(0.72, Origin.DEFAULT, _NODES)


@dataclass(frozen=True, slots=True)
class UserFigure:
    """One figure from the user.

    Attributes:
        field: memory, bandwidth, host_link, step_overhead, launch, kernel_floor, watts; peak.FORMAT;
            efficiency.KERNEL.FORMAT; scale_up.WHAT or scale_out.WHAT with bandwidth, latency, efficiency or devices.
        value: A number in SI units, or a text with a unit.
        source: The flag as it was given; reports name it.
    """

    field: str
    value: float | str
    source: str


def with_user_figures(accelerator: Accelerator, figures: Iterable[UserFigure]) -> Accelerator:
    """Replace figures of an accelerator, each with its origin.

    A link that the accelerator has no figures of needs a bandwidth; what else it needs is a named default.

    Raises:
        ConfigError: If fields are not known or values make no sense: all at once.
    """
    problems: list[Problem] = []
    for given in figures:
        try:
            accelerator = _with(accelerator, given)
        except ValueError as error:
            problems.append(Problem(given.source, f"{given.field} {error}"))
    if problems:
        raise ConfigError(problems)
    return accelerator


def _with(accelerator: Accelerator, given: UserFigure) -> Accelerator:
    match given.field.split("."):
        case [name] if name in _SINGLE:
            return replace(accelerator, **{name: _figure(given, _SINGLE[name])})  # type: ignore[arg-type]
        case ["peak", name]:
            peak = dict(accelerator.peak)
            peak[_dtype(name)] = _figure(given, Kind.FLOPS)
            return replace(accelerator, peak=peak)
        case ["efficiency", kernel, name]:
            if kernel not in set(Kernel):
                raise ValueError(f"names no class of kernels; choose from {', '.join(Kernel)}")
            efficiency = dict(accelerator.efficiency)
            efficiency[Kernel(kernel), _dtype(name)] = _figure(given, Kind.SHARE)
            return replace(accelerator, efficiency=efficiency)
        case ["scale_up", name]:
            return replace(accelerator, scale_up=_fabric(accelerator.scale_up, given, name))
        case ["scale_out", name]:
            return replace(accelerator, scale_out=_fabric(accelerator.scale_out, given, name))
    raise ValueError(f"is not a figure; known are {_ALL}")


def _figure(given: UserFigure, kind: Kind) -> Figure:
    return Figure(parse_quantity(given.value, kind), Origin.USER, given.source)


def _dtype(name: str) -> Dtype:
    if name not in set(Dtype):
        raise ValueError(f"names no number format; choose from {', '.join(Dtype)}")
    return Dtype(name)


def _fabric(fabric: Fabric | None, given: UserFigure, name: str) -> Fabric:
    if name == "devices":
        if isinstance(given.value, str) and not given.value.isdecimal():
            raise ValueError(f"is {given.value!r}; it must be a whole number of at least 2")
        count = int(given.value)
        if count < 2 or fabric is None:
            raise ValueError("must be at least 2, of a network that has a bandwidth; give that first")
        return replace(fabric, devices=count)
    if name not in _FABRIC:
        raise ValueError(f"is not a figure of a network; known are {', '.join(_FABRIC)}, devices")
    figure = _figure(given, _FABRIC[name])
    if fabric is not None:
        return replace(fabric, **{name: figure})  # type: ignore[arg-type]
    if name != "bandwidth":
        raise ValueError("is of a network that this accelerator has no bandwidth of; give that first")
    return Fabric(bandwidth=figure, latency=_LATENCY, devices=None, efficiency=_EFFICIENCY)
