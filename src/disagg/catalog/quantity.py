"""Numbers with units, as people write them: 80GiB, 3.35TB/s, 989TFLOP/s, 400Gbit/s, 5us."""

from __future__ import annotations

import math
import re
from enum import StrEnum

_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*?)?\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "\N{MICRO SIGN}": 1e-6, "n": 1e-9}


class Kind(StrEnum):
    """What a number measures; the value is its unit in a message."""

    BYTES = "bytes"
    RATE = "bytes per second"
    FLOPS = "operations per second"
    SECONDS = "seconds"
    WATTS = "watts"
    SHARE = "a share between 0 and 1"


_EXAMPLES = {
    Kind.BYTES: "80GB or 141GiB",
    Kind.RATE: "3350GB/s or 400Gbit/s",
    Kind.FLOPS: "989TFLOP/s or 325TOP/s",
    Kind.SECONDS: "5us",
    Kind.WATTS: "700W",
    Kind.SHARE: "0.75",
}


def _units(kind: Kind) -> dict[str, float]:
    sizes = _DECIMAL | _BINARY
    match kind:
        case Kind.BYTES:
            return {f"{prefix}B": factor for prefix, factor in sizes.items()}
        case Kind.RATE:
            return {f"{prefix}B/s": factor for prefix, factor in sizes.items()} | {
                f"{prefix}{bit}/s": factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("bit", "b")
            }
        case Kind.FLOPS:
            words = ("FLOP/s", "FLOPS", "OP/s", "OPS")
            return {f"{prefix}{word}": factor for prefix, factor in _DECIMAL.items() for word in words}
        case Kind.SECONDS:
            return {f"{prefix}s": factor for prefix, factor in _SMALL.items()}
        case Kind.WATTS:
            return {"W": 1.0, "kW": 1e3}
        case Kind.SHARE:
            return {"%": 0.01}


def parse_quantity(value: object, kind: Kind) -> float:
    """Read one number.

    Args:
        value: A number in SI units, or a text with a unit.
        kind: What it measures.

    Returns:
        The value in bytes, bytes/s, FLOP/s, seconds, watts, or as a plain ratio.

    Raises:
        ValueError: If it is not a positive finite number (zero seconds is fine), its unit is not one of the kind, or
            a share is above 1. A bare "gbps" is refused: it is written for bits and for bytes.
    """
    number, unit = _split(value, kind)
    factor = 1.0
    if unit:
        known = _units(kind)
        if unit not in known:
            raise ValueError(f"has the unit {unit!r}; write {kind} like {_EXAMPLES[kind]}")
        factor = known[unit]
    result = number * factor
    if not math.isfinite(result) or result < 0 or (result == 0 and kind is not Kind.SECONDS):
        raise ValueError(f"is {value!r}; it must be above zero, like {_EXAMPLES[kind]}")
    if kind is Kind.SHARE and result > 1:
        raise ValueError(f"is {value!r}; it must be {kind}")
    return result


def _split(value: object, kind: Kind) -> tuple[float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), ""
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"is {value!r}; write {kind} like {_EXAMPLES[kind]}")
    return float(match[1]), match[2] or ""


def format_quantity(value: float, kind: Kind) -> str:
    """Write a number for people: 80 GiB, 3350 GB/s, 989 TFLOP/s, 6.18 us, 700 W, 0.75."""
    match kind:
        case Kind.BYTES:
            whole = value % 2**20 == 0
            return f"{value / 2**30:.4g} GiB" if whole else f"{value / 1e9:.4g} GB"
        case Kind.RATE:
            return f"{value / 1e9:.5g} GB/s"
        case Kind.FLOPS:
            return f"{value / 1e12:.6g} TFLOP/s"
        case Kind.SECONDS:
            return f"{value * 1e6:.4g} us"
        case Kind.WATTS:
            return f"{value:.4g} W"
        case Kind.SHARE:
            return f"{value:.3g}"
