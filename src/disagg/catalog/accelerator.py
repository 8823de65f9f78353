"""What a device can do, as far as cost depends on it. Every figure has its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from disagg.catalog.figure import Figure, Origin
from disagg.catalog.precision import Dtype


class Kernel(StrEnum):
    """A class of kernels that reaches its own share of a device's peak."""

    GEMM = "gemm"
    """Large matrix products: share of peak FLOP/s."""
    WEIGHTS = "weights"
    """Matrix products of few tokens, which stream weights: share of memory bandwidth."""
    PREFILL_ATTENTION = "prefill_attention"
    """Share of peak FLOP/s, causal FLOPs counted."""
    DECODE_ATTENTION = "decode_attention"
    """Streams the KV cache: share of memory bandwidth."""
    GROUPED_GEMM = "grouped_gemm"
    """Experts' products with many tokens each: share of peak FLOP/s."""
    ELEMENTWISE = "elementwise"
    """Norms, casts, sampling: share of memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between devices.

    Attributes:
        bandwidth: Bytes/s per direction and device.
        latency: Seconds of one hop of a collective.
        devices: Devices that it joins; None without a bound.
        efficiency: Share of the bandwidth that large collectives reach.
    """

    bandwidth: Figure
    latency: Figure
    devices: int | None
    efficiency: Figure


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured times of one collective among some devices of a node.

    Attributes:
        devices: How many take part.
        sizes: Bytes, ascending: all-reduce the vector that every device has; all-gather and reduce-scatter the
            whole vector; all-to-all what one device sends to all devices, itself included.
        seconds: Time of one call at each size. The first is its latency; the last one's size over its time tells
            the bandwidth that larger ones reach.
        origin: How firm it is.
        source: Who measured it, with what.
    """

    devices: int
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device.

    Attributes:
        name: Name in the catalogue.
        aliases: Other names that find it (gfx942, H100-SXM5 ...).
        vendor: Who makes it.
        peak: Dense FLOP/s (operations/s for integers) by number format.
        memory: Bytes of device memory.
        bandwidth: Bytes/s of device memory.
        scale_up: The network inside a node or domain; None for a device that has none.
        scale_out: The network between nodes, per device; None if not known.
        host_link: Bytes/s between device and host memory, per direction; None if not known.
        efficiency: Shares of the peaks that kernels reach, by class and number format of their weights (or KV).
        step_overhead: Seconds that the host and launches add to a step under graph capture.
        launch: Seconds per kernel launch without graph capture.
        kernel_floor: Seconds of the smallest matrix product, also under graph capture; other kernels take multiples.
        watts: Board power; None if not known.
        collectives: Measured collectives inside a node: all_reduce, all_gather, reduce_scatter and all_to_all of the
            vendor's library; custom_all_reduce is the engines' own kernel under graph capture, which they use for
            what it does faster than the library. Empty where nobody measured it.
        notes: What to know about the figures: sources that differ, what is missing.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    peak: Mapping[Dtype, Figure]
    memory: Figure
    bandwidth: Figure
    scale_up: Fabric | None
    scale_out: Fabric | None
    host_link: Figure | None
    efficiency: Mapping[tuple[Kernel, Dtype], Figure]
    step_overhead: Figure | None = None
    launch: Figure | None = None
    kernel_floor: Figure | None = None
    watts: Figure | None = None
    collectives: Mapping[str, tuple[CollectiveCurve, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())
