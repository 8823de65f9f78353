"""A projection as rows for a spreadsheet."""

from __future__ import annotations

import csv
import io

from disagg.project.result import Projection


def as_csv(projection: Projection) -> str:
    """One row per figure: name, value, unit, what it rests on, how it is made."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["figure", "value", "unit", "basis", "how"])
    for name, quantity in projection.figures.items():
        rows.writerow([name, quantity.value, quantity.unit, quantity.basis.value, quantity.how])
    return out.getvalue()
