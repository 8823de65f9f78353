"""What of a device's peaks kernels reach: the accelerator's figures, with documented stand-ins where it has none."""

from __future__ import annotations

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.precision import Dtype
from disagg.errors import ConfigError, Problem

# What computes in place of a format that a device has no arithmetic for, in order: first a format of the same
# width, then wider ones, to which kernels expand the weights as they read them.
_COMPUTED_AS: dict[Dtype, tuple[Dtype, ...]] = {
    Dtype.NVFP4: (Dtype.MXFP4, Dtype.MXFP8, Dtype.FP8, Dtype.BF16, Dtype.FP16),
    Dtype.MXFP4: (Dtype.NVFP4, Dtype.MXFP8, Dtype.FP8, Dtype.BF16, Dtype.FP16),
    Dtype.MXFP6: (Dtype.MXFP8, Dtype.FP8, Dtype.INT8, Dtype.BF16, Dtype.FP16),
    Dtype.MXFP8: (Dtype.FP8, Dtype.BF16, Dtype.FP16),
    Dtype.MXINT8: (Dtype.INT8, Dtype.BF16, Dtype.FP16),
    Dtype.INT4: (Dtype.INT8, Dtype.BF16, Dtype.FP16),
    Dtype.FP8: (Dtype.MXFP8, Dtype.BF16, Dtype.FP16),
    Dtype.INT8: (Dtype.MXINT8, Dtype.BF16, Dtype.FP16),
    Dtype.BF16: (Dtype.FP16, Dtype.FP32),
    Dtype.FP16: (Dtype.BF16, Dtype.FP32),
    Dtype.FP32: (),
}

# Formats whose kernels are alike enough to lend each other their efficiency, nearest first.
_LIKE: dict[Dtype, tuple[Dtype, ...]] = {
    Dtype.NVFP4: (Dtype.MXFP4, Dtype.FP8, Dtype.MXFP8, Dtype.INT8),
    Dtype.MXFP4: (Dtype.NVFP4, Dtype.FP8, Dtype.MXFP8, Dtype.INT8),
    Dtype.MXFP6: (Dtype.MXFP8, Dtype.FP8, Dtype.INT8),
    Dtype.MXFP8: (Dtype.FP8, Dtype.INT8),
    Dtype.MXINT8: (Dtype.INT8, Dtype.FP8),
    Dtype.INT4: (Dtype.INT8, Dtype.FP8),
    Dtype.FP8: (Dtype.MXFP8, Dtype.INT8),
    Dtype.INT8: (Dtype.FP8, Dtype.MXINT8),
    Dtype.BF16: (Dtype.FP16,),
    Dtype.FP16: (Dtype.BF16,),
    Dtype.FP32: (),
}

_TABLES = "median over A100, H100, H200, B200 and L40S in the kernel tables of ai-dynamo/aiconfigurator 0.12"

DEFAULT_EFFICIENCY: dict[Kernel, Figure] = {
    Kernel.GEMM: Figure(0.69, Origin.DEFAULT, f"large BF16 products, {_TABLES}"),
    Kernel.WEIGHTS: Figure(0.83, Origin.DEFAULT, f"large BF16 weights and few tokens, {_TABLES}"),
    Kernel.PREFILL_ATTENTION: Figure(0.45, Origin.DEFAULT, f"causal BF16 attention, {_TABLES}"),
    Kernel.DECODE_ATTENTION: Figure(0.79, Origin.DEFAULT, f"KV reads in BF16, {_TABLES}"),
    Kernel.GROUPED_GEMM: Figure(0.63, Origin.DEFAULT, "large FP8 products on H800, alibaba/InferSim's tables"),
    Kernel.ELEMENTWISE: Figure(0.57, Origin.DEFAULT, "activation functions on H100 in microsoft/vidur's profile"),
}
"""Shares of the peaks that stand in where an accelerator has no figure of a class."""

DEFAULT_KERNEL_FLOOR = Figure(
    2.4e-6,
    Origin.DEFAULT,
    "smallest products of A100, H100, H200, B200 and L40S, 1.8 to 2.9 us, in tables of ai-dynamo/aiconfigurator",
)
"""Seconds of the smallest matrix product."""


class Device:
    """Rates that kernels reach on one accelerator, and a record of the figures that were asked for.

    Args:
        accelerator: The catalogue's entry.

    Attributes:
        notes: The figures that took part so far, as text, in order of first use.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rates: dict[tuple[Kernel, Dtype, Dtype], float] = {}
        self._peaks: dict[tuple[Dtype, Dtype], float] = {}
        self._streams: dict[tuple[Kernel, Dtype], float] = {}
        self.notes: dict[str, None] = {}
        self.floor = self._noted("kernel floor", accelerator.kernel_floor or DEFAULT_KERNEL_FLOOR)

    def rate(self, kernel: Kernel, dtype: Dtype, operand: Dtype) -> float:
        """FLOP/s that large kernels of a class reach: peak x efficiency.

        Args:
            kernel: The class.
            dtype: Format of the weights or the KV cache.
            operand: Format of the other operand; the wider of both is what the arithmetic is done in.

        Raises:
            ConfigError: If the accelerator has no peak for the format nor for one that can stand in.
        """
        key = (kernel, dtype, operand)
        if key not in self._rates:
            computed = self._computed_in(dtype, operand)
            self._rates[key] = self.peak(dtype, operand) * self._efficiency(kernel, computed)
        return self._rates[key]

    def peak(self, dtype: Dtype, operand: Dtype) -> float:
        """FLOP/s of the device for two operands; see `rate`."""
        key = (dtype, operand)
        if key not in self._peaks:
            computed = self._computed_in(dtype, operand)
            self._peaks[key] = self._noted(f"peak {computed}", self._accelerator.peak[computed])
        return self._peaks[key]

    def stream(self, kernel: Kernel, dtype: Dtype) -> float:
        """Bytes/s of device memory that kernels of a class reach: bandwidth x efficiency."""
        key = (kernel, dtype)
        if key not in self._streams:
            bandwidth = self._noted("memory bandwidth", self._accelerator.bandwidth)
            self._streams[key] = bandwidth * self._efficiency(kernel, dtype)
        return self._streams[key]

    def _computed_in(self, first: Dtype, second: Dtype) -> Dtype:
        dtype = first if first.bytes_per_element >= second.bytes_per_element else second
        for candidate in (dtype, *_COMPUTED_AS[dtype]):
            if candidate in self._accelerator.peak:
                if candidate is not dtype:
                    self.notes.setdefault(f"{self._accelerator.name} computes {dtype} as {candidate}")
                return candidate
        have = ", ".join(self._accelerator.peak) or "none"
        message = f"no peak for {dtype} nor for a format that it could be computed in (it has: {have})"
        raise ConfigError([Problem(f"accelerator {self._accelerator.name}", message)])

    def _efficiency(self, kernel: Kernel, dtype: Dtype) -> float:
        table = self._accelerator.efficiency
        for candidate in (dtype, *_LIKE[dtype]):
            if (kernel, candidate) in table:
                return self._noted(f"{kernel} {candidate}", table[kernel, candidate])
        return self._noted(str(kernel), DEFAULT_EFFICIENCY[kernel])

    def _noted(self, name: str, figure: Figure) -> float:
        self.notes.setdefault(f"{name}: {figure}")
        return figure.value
