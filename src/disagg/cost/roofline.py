"""Seconds of operators: arithmetic against memory traffic, each at the rate that kernels reach, and a kernel's least.

Published efficiencies are those of large kernels. What small ones lose is described by four rules whose constants
come from kernel tables (BF16 and FP8 products, context and generation attention of A100, H100, H200, B200 and L40S in
ai-dynamo/aiconfigurator 0.12; grouped products of H20 and H800 in alibaba/InferSim), never from serving runs:

* a kernel takes at least a few microseconds, in multiples of the device's smallest matrix product;
* a product sums up its inner width step by step, which takes time however few its outputs are;
* between memory-bound and compute-bound the two overlap, but not perfectly: (arithmetic^4 + memory^4)^(1/4) instead
  of the longer one, which is 2^(1/4) = 1.19 of each where both are equal;
* arithmetic that nobody asked for: tiles that are not full, what attention does per token beside looking back.

`benchmarks/kernel_accuracy.py` compares them with the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.cost.device import Device
from disagg.cost.operator import Operator
from disagg.cost.work import Array, Estimate

SMALLEST_KERNELS: dict[Kernel, float] = {
    Kernel.GEMM: 1.3,
    Kernel.WEIGHTS: 1.3,
    Kernel.GROUPED_GEMM: 2.5,
    Kernel.PREFILL_ATTENTION: 6.0,
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
    """Seconds of operators.

    Attributes:
        seconds: All calls of each operator, shape (operators, *points).
        waiting: The part of `seconds` that waits for memory, same shape.
    """

    seconds: Array
    waiting: Array


def timed(operators: Sequence[Operator], device: Device, points: tuple[int, ...]) -> Timed:
    """Time of operators on a device.

    Args:
        operators: What to time; all at once, as a step has dozens and most callers a single point.
        device: Where.
        points: The shape that their amounts broadcast to.
    """
    shape = (len(operators), *points)
    arithmetic, memory, least = np.empty(shape), np.empty(shape), np.empty(shape)
    for row, operator in enumerate(operators):
        arithmetic[row] = (operator.flops + operator.wasted) / _rate(operator, device)
        memory[row] = operator.moved / device.stream(operator.streaming, operator.dtype)
        kernels = SMALLEST_KERNELS[operator.arithmetic] + SUMMING * operator.depth
        least[row] = kernels * operator.calls * device.floor
    longer, shorter = np.maximum(arithmetic, memory), np.minimum(arithmetic, memory)
    works = longer > 0
    overlap = shorter / np.where(works, longer, 1.0)
    squared = overlap * overlap
    busy = longer * np.sqrt(np.sqrt(1.0 + squared * squared))
    return Timed(busy + least * works, busy * (memory >= arithmetic))


def _rate(operator: Operator, device: Device) -> float:
    """FLOP/s. Attention that is bound by arithmetic reaches the same share of the peak in decode as in prefill."""
    if operator.arithmetic not in ATTENTION:
        return device.rate(operator.arithmetic, operator.dtype, operator.operand)
    rate = device.rate(Kernel.PREFILL_ATTENTION, operator.dtype, operator.operand)
    return min(rate * LONG_PROMPTS, device.peak(operator.dtype, operator.operand))


def by_part(operators: Sequence[Operator], seconds: Array) -> dict[str, Array]:
    """Seconds summed over the operators of each part, in order of first occurrence."""
    rows: dict[str, list[int]] = {}
    for row, operator in enumerate(operators):
        rows.setdefault(operator.part, []).append(row)
    return {part: seconds[which].sum(axis=0) if len(which) > 1 else seconds[which[0]] for part, which in rows.items()}


def estimate(operators: Sequence[Operator], device: Device) -> Estimate:
    """Operators one after another on one device, and nothing else."""
    points = np.broadcast_shapes(*(np.shape(operator.moved) for operator in operators))
    time = timed(operators, device, points)
    whole = time.seconds.sum(axis=0)
    return Estimate(
        seconds=whole,
        parts=by_part(operators, time.seconds),
        memory_bound=time.waiting.sum(axis=0) / np.where(whole > 0, whole, 1.0),
        flops=total([operator.flops for operator in operators], points),
        moved=total([operator.moved for operator in operators], points),
        notes=tuple(device.notes),
    )


def total(arrays: Sequence[Array], points: tuple[int, ...]) -> Array:
    """Sum of arrays that broadcast to a shape."""
    whole = np.zeros(points)
    for array in arrays:
        whole = whole + array
    return whole
