"""A processor as an accelerator, from what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.precision import Dtype


@dataclass(frozen=True, slots=True)
class HostFigures:
    """What was measured with so many threads.

    Attributes:
        threads: How many.
        peak: FLOP/s of large products by number format.
        copy: Bytes/s moved by a copy, reads and writes both counted.
        read: Bytes/s read by a matrix that multiplies a vector.
        how: Date, number of threads and library.
    """

    threads: int
    peak: Mapping[Dtype, float]
    copy: float
    read: float
    how: str


def host_accelerator(name: str, processor: str, memory: int, measured: HostFigures) -> Accelerator:
    """The processor as a device.

    The peak is what large products reach, so their share of it is 1. The bandwidth is the larger of copying and
    reading; what each reaches of it is the share of norms and of streamed weights.

    Args:
        name: What to call it.
        processor: Name of the processor.
        memory: Bytes of the machine.
        measured: With the threads that an engine would use.
    """
    bandwidth = max(measured.copy, measured.read)

    def figure(value: float, what: str) -> Figure:
        return Figure(value, Origin.MEASURED, f"{what}, {measured.how}")

    efficiency: dict[tuple[Kernel, Dtype], Figure] = {}
    for dtype in measured.peak:
        efficiency[Kernel.GEMM, dtype] = figure(1.0, "the peak is that of such products")
        efficiency[Kernel.WEIGHTS, dtype] = figure(measured.read / bandwidth, "matrix of 512 MiB times a vector")
        efficiency[Kernel.ELEMENTWISE, dtype] = figure(measured.copy / bandwidth, "copy of 512 MiB")
    return Accelerator(
        name=name,
        aliases=(),
        vendor=processor or "unknown",
        peak={dtype: figure(value, "products of 2048 x 2048 matrices") for dtype, value in measured.peak.items()},
        memory=figure(float(memory), "size of the machine's memory"),
        bandwidth=figure(bandwidth, "copy of 512 MiB, or matrix of 512 MiB times a vector"),
        scale_up=None,
        scale_out=None,
        host_link=None,
        efficiency=efficiency,
    )
