"""Times of collectives between measured sizes and numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg.catalog.accelerator import CollectiveCurve
from disagg.cost.work import Array


def measured_seconds(curves: Sequence[CollectiveCurve], ranks: int, size: Array) -> Array | None:
    """Time of one collective, by interpolation.

    Sizes between two measured ones are interpolated on logarithmic axes; smaller ones take the time of the smallest,
    larger ones the bandwidth of the largest. A number of ranks between two measured ones is interpolated in log2.

    Args:
        curves: One per number of devices.
        ranks: Devices that take part.
        size: Bytes, as the curves count them.

    Returns:
        Seconds, shape of `size`; None if the number of ranks is outside what was measured.
    """
    by_devices = {curve.devices: curve for curve in curves}
    below = max((n for n in by_devices if n <= ranks), default=None)
    above = min((n for n in by_devices if n >= ranks), default=None)
    if below is None or above is None:
        return None
    lower = _along(by_devices[below], size)
    if below == above:
        return lower
    weight = float(np.log2(ranks / below) / np.log2(above / below))
    return lower * (1.0 - weight) + _along(by_devices[above], size) * weight


def _along(curve: CollectiveCurve, size: Array) -> Array:
    sizes = np.asarray(curve.sizes)
    # Where a larger one was measured to be faster, that is noise or a better algorithm that the smaller one could
    # have used too; either way more bytes must not cost less.
    seconds = np.maximum.accumulate(np.asarray(curve.seconds))
    held = np.clip(size, sizes[0], sizes[-1])
    inside = np.exp(np.interp(np.log(held), np.log(sizes), np.log(seconds)))
    found: Array = inside * np.maximum(size / sizes[-1], 1.0)
    return found
