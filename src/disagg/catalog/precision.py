"""Number formats and their sizes."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """A number format of weights, activations or the KV cache."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP6 = "mxfp6"
    MXFP8 = "mxfp8"
    MXINT8 = "mxint8"

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one element takes, with its share of the block's scale."""
        return _BYTES[self]


# A block format stores one 8-bit scale per block: 32 elements in the OCP MX formats, 16 in NVFP4. INT4 is the
# usual grouped form with one 16-bit scale per 128 elements.
_BYTES = {
    Dtype.FP32: 4.0,
    Dtype.BF16: 2.0,
    Dtype.FP16: 2.0,
    Dtype.FP8: 1.0,
    Dtype.INT8: 1.0,
    Dtype.INT4: 0.5 + 2 / 128,
    Dtype.NVFP4: 0.5 + 1 / 16,
    Dtype.MXFP4: 0.5 + 1 / 32,
    Dtype.MXFP6: 0.75 + 1 / 32,
    Dtype.MXFP8: 1.0 + 1 / 32,
    Dtype.MXINT8: 1.0 + 1 / 32,
}
