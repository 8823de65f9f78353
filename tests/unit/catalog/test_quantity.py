"""Numbers with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.catalog.quantity import Kind, parse_quantity


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80GiB", Kind.BYTES, 80 * 2**30),
        ("80 GB", Kind.BYTES, 80e9),
        ("46068MiB", Kind.BYTES, 46068 * 2**20),
        ("3.35TB/s", Kind.RATE, 3.35e12),
        ("400Gbit/s", Kind.RATE, 50e9),
        ("400Gb/s", Kind.RATE, 50e9),
        ("989TFLOP/s", Kind.FLOPS, 989e12),
        ("325TOP/s", Kind.FLOPS, 325e12),
        ("5us", Kind.SECONDS, 5e-6),
        ("0", Kind.SECONDS, 0.0),
        ("700W", Kind.WATTS, 700.0),
        ("75%", Kind.SHARE, 0.75),
        (0.5, Kind.SHARE, 0.5),
        (12, Kind.BYTES, 12.0),
    ],
)
def test_units_are_read(text: object, kind: Kind, value: float) -> None:
    """Decimal and binary prefixes, bits and bytes are told apart: 400 Gbit/s are 50 GB/s."""
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("400gbps", Kind.RATE),
        ("80GB", Kind.RATE),
        ("3GB/s", Kind.BYTES),
        ("-5us", Kind.SECONDS),
        ("0GB", Kind.BYTES),
        ("1.2", Kind.SHARE),
        ("nan", Kind.SHARE),
        (float("nan"), Kind.BYTES),
        (float("inf"), Kind.BYTES),
        (True, Kind.BYTES),
        (None, Kind.BYTES),
        ("", Kind.BYTES),
    ],
)
def test_what_has_no_clear_meaning_is_refused(text: object, kind: Kind) -> None:
    """A bare gbps, a unit of another kind, a negative or absurd number is refused, with an example of a right one."""
    with pytest.raises(ValueError, match=r"like|must be"):
        parse_quantity(text, kind)


@given(
    st.floats(min_value=1e-3, max_value=1e6),
    st.sampled_from([("GB/s", 1e9), ("MiB/s", 2.0**20), ("Tbit/s", 1.25e11)]),
)
def test_any_number_with_a_unit_is_read_back(number: float, unit: tuple[str, float]) -> None:
    """What is written with a unit is its number times the unit, for any number."""
    assert parse_quantity(f"{number!r}{unit[0]}", Kind.RATE) == pytest.approx(number * unit[1], rel=1e-12)
