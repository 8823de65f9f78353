"""Seconds of operators: arithmetic against memory traffic, each at the rate that kernels reach, and a kernel's least.

Published efficiencies are those of large kernels. What small ones lose is described by four rules whose constants
come from kernel tables (BF16 and FP8 products, context and generation attention of A100, H100, H200, B200 and L40S in
ai-dynamo/aiconfigurator 0.12; grouped products of H20 and H800 in alibaba/InferSim), never from serving runs:

* a kernel takes at least a few microseconds, in multiples of the device's smallest matrix product;
* a product sums up its inner width step by step, which takes time however few its outputs are;
* between memory-bound and compute-bound the two overlap, but not perfectly: a p-norm instead of a maximum;
* arithmetic that nobody asked for: tiles that are not full, what attention does per token beside looking back.

`benchmarks/kernel_accuracy.py` compares them with the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.cost.device import Device
from disagg.cost.operator import Operator
from disagg.cost.work import Array, Estimate

SMOOTHNESS = 4.0
"""p of the norm that joins arithmetic and memory time: where both are equal, it is 2^(1/4) = 1.19 of each."""

SMALLEST_KERNELS: dict[Kernel, float] = {
    Kernel.GEMM: 1.3,
    Kernel.WEIGHTS: 1.3,
    Kernel.GROUPED_GEMM: 1.3,
    Kernel.PREFILL_ATTENTION: 5.0,
    Kernel.DECODE_ATTENTION: 3.5,
    Kernel.ELEMENTWISE: 0.8,
}
"""Least time of a kernel, in smallest products of the device. Attention is several kernels: what is split over the
context is put together again."""

SUMMING = 0.12e-3
"""Time per element of a product's inner width, in smallest products of the device: 0.29 ns if these take 2.4 us."""

LONG_PROMPTS = 1.1
"""By how much very long prompts exceed the published efficiency of context attention, which is a median over prompts
from 4 096 tokens on and contains what `wasted` describes."""

ATTENTION = (Kernel.PREFILL_ATTENTION, Kernel.DECODE_ATTENTION)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one operator.

    Attributes:
        seconds: All its calls.
        waiting: The part of `seconds` that waits for memory.
    """

    seconds: Array
    waiting: Array


def timed(operator: Operator, device: Device) -> Timed:
    """Time of all calls of an operator on a device."""
    arithmetic = (operator.flops + operator.wasted) / _rate(operator, device)
    memory = operator.moved / device.stream(operator.streaming, operator.dtype)
    longer, shorter = np.maximum(arithmetic, memory), np.minimum(arithmetic, memory)
    overlap = shorter / np.where(longer > 0, longer, 1.0)
    busy = longer * (1.0 + overlap**SMOOTHNESS) ** (1.0 / SMOOTHNESS)
    least = (SMALLEST_KERNELS[operator.arithmetic] + SUMMING * operator.depth) * (operator.calls * device.floor)
    whole = np.where(longer > 0, busy + least, 0.0)
    return Timed(whole, np.where(memory >= arithmetic, busy, 0.0))


def _rate(operator: Operator, device: Device) -> float:
    """FLOP/s. Attention that is bound by arithmetic reaches the same share of the peak in decode as in prefill."""
    if operator.arithmetic not in ATTENTION:
        return device.rate(operator.arithmetic, operator.dtype, operator.operand)
    rate = device.rate(Kernel.PREFILL_ATTENTION, operator.dtype, operator.operand)
    return min(rate * LONG_PROMPTS, device.peak(operator.dtype, operator.operand))


def estimate(operators: list[Operator], device: Device) -> Estimate:
    """Operators one after another on one device, and nothing else."""
    times = [timed(operator, device) for operator in operators]
    points = np.broadcast_shapes(*(time.seconds.shape for time in times))
    parts: dict[str, Array] = {}
    for operator, time in zip(operators, times, strict=True):
        parts[operator.part] = parts.get(operator.part, np.zeros(points)) + time.seconds
    whole = total(list(parts.values()), points)
    waiting = total([time.waiting for time in times], points)
    return Estimate(
        seconds=whole,
        parts=parts,
        memory_bound=waiting / np.where(whole > 0, whole, 1.0),
        flops=total([operator.flops for operator in operators], points),
        moved=total([operator.moved for operator in operators], points),
        notes=tuple(device.notes),
    )


def total(arrays: list[Array], points: tuple[int, ...]) -> Array:
    """Sum of arrays that broadcast to a shape."""
    whole = np.zeros(points)
    for array in arrays:
        whole = whole + array
    return whole
