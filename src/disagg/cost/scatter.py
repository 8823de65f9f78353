"""Interpolation between measured points that need not form a grid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disagg.cost.work import Array


class Scatter:
    """Values at points of two coordinates, both interpolated on logarithmic axes.

    Points of equal first coordinate form a row. Along each row values are interpolated over the second coordinate,
    then between rows over the first; beyond the outermost points the nearest value holds. A full grid is thus
    interpolated bilinearly, and a single row or column along itself.

    Args:
        points: First coordinate, second coordinate, value; at least one.
    """

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        rows: dict[float, dict[float, list[float]]] = {}
        for first, second, value in points:
            rows.setdefault(float(_log(first)), {}).setdefault(float(_log(second)), []).append(value)
        self._first = np.asarray(sorted(rows))
        self._rows = [
            (np.asarray(sorted(row)), np.asarray([float(np.mean(row[at])) for at in sorted(row)]))
            for row in (rows[first] for first in sorted(rows))
        ]
        seconds = [float(_log(second)) for _, second, _ in points]
        self._bounds = ((self._first[0], self._first[-1]), (min(seconds), max(seconds)))

    def at(self, first: Array, second: Array) -> Array:
        """Values at some points, of the shape that both arrays broadcast to."""
        x, y = np.broadcast_arrays(_log(first), _log(second))
        along = np.stack([np.interp(y, where, values) for where, values in self._rows])
        if len(self._rows) == 1:
            only: Array = along[0]
            return only
        right = np.clip(np.searchsorted(self._first, x), 1, len(self._rows) - 1)
        low, high = self._first[right - 1], self._first[right]
        weight = np.clip((x - low) / (high - low), 0.0, 1.0)
        before, after = _taken(along, right - 1), _taken(along, right)
        found: Array = before * (1.0 - weight) + after * weight
        return found

    def doublings(self, first: Array, second: Array) -> Array:
        """How far points are outside of what was measured, in doublings of the coordinate that is farther out."""
        (low_x, high_x), (low_y, high_y) = self._bounds
        x, y = _log(first), _log(second)
        out_x = np.maximum(np.maximum(low_x - x, x - high_x), 0.0)
        out_y = np.maximum(np.maximum(low_y - y, y - high_y), 0.0)
        farther: Array = np.maximum(out_x, out_y) / np.log(2.0)
        return farther


def _log(value: Array | float) -> Array:
    """Logarithm of a coordinate; below one token it does not matter where."""
    logarithm: Array = np.log(np.maximum(np.asarray(value, dtype=np.float64), 1.0))
    return logarithm


def _taken(rows: Array, which: NDArray[np.intp]) -> Array:
    """From each column of `rows` the entry of its own row."""
    found: Array = np.take_along_axis(rows, which[None, ...], axis=0)[0]
    return found
