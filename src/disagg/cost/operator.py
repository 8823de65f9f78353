"""One kind of kernel in a step: how much it computes and moves. Counts only; `roofline` turns them into seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.catalog.accelerator import Kernel
from disagg.catalog.precision import Dtype
from disagg.cost.work import Array

ACTIVATION_BYTES = 2.0
"""Bytes per element of what layers hand to each other: engines keep the residual stream in a 16-bit format."""


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one kind on the busiest device in one step.

    Attributes:
        part: Which part of the step it counts as.
        arithmetic: Its class of kernels as far as FLOP/s go.
        streaming: Its class of kernels as far as memory goes.
        dtype: Number format of its weights, or of the KV cache: what the efficiencies are looked up by.
        operand: The other operand's number format; the wider one sets the peak.
        calls: Kernels.
        flops: Arithmetic of all calls.
        moved: Bytes read and written by all calls.
        wasted: Arithmetic that is done but not asked for, and that grows with the work: rows that fill up tiles,
            what a token's attention costs whatever it looks back on. In FLOPs, all calls.
        depth: Inner width of a matrix product, along which one output tile is summed up step by step; 0 for others.
    """

    part: str
    arithmetic: Kernel
    streaming: Kernel
    dtype: Dtype
    operand: Dtype
    calls: float
    flops: Array
    moved: Array
    wasted: Array | float = 0.0
    depth: float = 0.0


def product(
    part: str, rows: Array, shape: tuple[float, float], calls: float, weights: Dtype, activations: Dtype
) -> list[Operator]:
    """Matrix products of `rows` tokens with weights of `shape` (inputs, outputs), on one device.

    2 x rows x inputs x outputs FLOPs a call; weights are read once, inputs read and outputs written once. Without
    rows the weights are not read. Inputs narrower than the stream are cast before: read at its width, written at
    theirs.
    """
    inputs, outputs = shape
    taken = rows > 0
    weight_bytes = inputs * outputs * weights.bytes_per_element
    moved = np.where(taken, weight_bytes, 0.0) + rows * (
        inputs * activations.bytes_per_element + outputs * ACTIVATION_BYTES
    )
    flops = rows * (2.0 * inputs * outputs)
    whole = Operator(
        part, Kernel.GEMM, Kernel.WEIGHTS, weights, activations, calls, flops * calls, moved * calls, depth=inputs
    )
    return [*cast(rows, inputs, calls, activations), whole]


def cast(rows: Array, width: float, calls: float, activations: Dtype) -> list[Operator]:
    """Conversion of `rows` vectors to the format of a product's inputs; nothing where that is not narrower.

    In kernel tables, products of 8-bit inputs take longer than those of 16-bit ones by just such a kernel; engines
    fuse it with the kernel before it (`step.step_operators`).
    """
    target = activations.bytes_per_element
    if target >= ACTIVATION_BYTES:
        return []
    moved = rows * (width * (ACTIVATION_BYTES + target) * calls)
    bf16 = Dtype.BF16
    zero = np.zeros(())
    return [Operator("casts", Kernel.ELEMENTWISE, Kernel.ELEMENTWISE, bf16, bf16, calls, zero, moved)]


def stream(part: str, moved: Array, calls: float, flops: Array | float = 0.0) -> Operator:
    """Kernels without weights that do little with what they read: norms, casts, embedding, sampling."""
    return Operator(
        part,
        Kernel.ELEMENTWISE,
        Kernel.ELEMENTWISE,
        Dtype.BF16,
        Dtype.BF16,
        calls,
        np.asarray(flops, dtype=np.float64) * calls,
        moved * calls,
    )
