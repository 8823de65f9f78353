"""Seconds of operators: the longer of arithmetic and memory traffic, each at the rate that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.device import Device
from disagg.cost.operator import Operator
from disagg.cost.work import Array


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
    arithmetic = operator.flops / device.rate(operator.arithmetic, operator.dtype, operator.operand)
    memory = operator.moved / device.stream(operator.streaming, operator.dtype)
    busy = np.maximum(arithmetic, memory)
    floor = np.where(operator.moved > 0, operator.calls * device.floor, 0.0)
    return Timed(busy + floor, np.where(memory >= arithmetic, busy, 0.0))
