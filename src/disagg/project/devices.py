"""A device of the catalogue with the figures that the user gave in place of its own."""

from __future__ import annotations

from dataclasses import replace

from disagg.catalog.accelerator import Accelerator, CollectiveCurve, Kernel
from disagg.catalog.figure import Figure
from disagg.catalog.precision import Dtype
from disagg.catalog.user_figures import UserFigure, with_user_figures
from disagg.cost.memory import GIB
from disagg.errors import ConfigError, Problem
from disagg.topology.projection_spec import Projection

# Time of attention kernels in terms of the default ones: InferaSim's presets.
_ATTENTION_TIME = {"default": 1.0, "aiter": 0.85, "ck": 0.9, "triton": 1.0, "hip": 1.1}
_ATTENTION = (Kernel.PREFILL_ATTENTION, Kernel.DECODE_ATTENTION)
_ALL_REDUCE = ("all_reduce", "custom_all_reduce")
_ALL_TO_ALL = ("all_to_all",)


def with_settings(device: Accelerator, settings: Projection) -> Accelerator:
    """Replace figures of a device.

    Raises:
        ConfigError: If a peak is given for a number format that there is not.
    """
    device = with_user_figures(device, _figures(settings))
    factor = _ATTENTION_TIME[settings.attention_backend]
    if factor != 1.0:
        device = replace(device, efficiency=_faster(device, factor, settings.attention_backend))
    for names, speed in ((_ALL_REDUCE, settings.tp_allreduce_efficiency), (_ALL_TO_ALL, settings.ep_a2a_efficiency)):
        if speed != 1.0:
            device = replace(device, collectives=_collectives(device, names, speed))
    return device


def _figures(settings: Projection) -> list[UserFigure]:
    """What the user gave in place of the catalogue's figures, in SI units."""
    given: list[UserFigure] = []
    if settings.hbm_capacity_gb is not None:
        given.append(UserFigure("memory", settings.hbm_capacity_gb * GIB, "--hbm-capacity-gb"))
    if settings.memory_bw_gbps is not None:
        given.append(UserFigure("bandwidth", settings.memory_bw_gbps * 1e9, "--memory-bw-gbps"))
    problems: list[Problem] = []
    for name, value in (settings.peak_tflops or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(Problem("projection.peak_tflops", f"{name} has to be a number of TFLOP/s"))
        else:
            given.append(UserFigure(f"peak.{name}", float(value) * 1e12, "--peak-tflops"))
    if problems:
        raise ConfigError(problems)
    return given


def _faster(device: Accelerator, factor: float, backend: str) -> dict[tuple[Kernel, Dtype], Figure]:
    """Shares of the peaks with attention taking `factor` of its time; a share stays one."""
    return {
        key: Figure(min(f.value / factor, 1.0), f.origin, f"{f.source}; --attention-backend {backend}")
        if key[0] in _ATTENTION
        else f
        for key, f in device.efficiency.items()
    }


def _collectives(device: Accelerator, names: tuple[str, ...], speed: float) -> dict[str, tuple[CollectiveCurve, ...]]:
    """Measured collectives with their times divided by `speed`."""
    return {
        name: tuple(replace(c, seconds=tuple(s / speed for s in c.seconds)) for c in curves)
        if name in names
        else curves
        for name, curves in device.collectives.items()
    }
