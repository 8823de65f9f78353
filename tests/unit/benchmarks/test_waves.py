"""Short closed-loop runs in which all clients begin at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from benchmarks.waves import Station, wave_response

SECONDS = st.floats(0.001, 10.0)


def response(station: Station, think: float, clients: int, rounds: int, shortest: float = 1.0) -> float:
    return wave_response(station, think, clients, rounds, shortest, default_rng(1))


def test_one_client_never_waits() -> None:
    """With nobody else each prompt takes its service."""
    assert response(Station(2.0, 1.0, 8), 5.0, 1, 10) == pytest.approx(2.0)


def test_a_burst_one_by_one_and_together() -> None:
    """Three prompts at once: one by one they end after 2, 4, 6, 4 on average; together after 2 + 2 x 1 = 4, all.

    In batches of two the first pair ends after 2 + 1 = 3, the third after 3 + 2 = 5: 11 / 3.
    """
    assert response(Station(2.0, 2.0, 1), 9.0, 3, 1) == pytest.approx(4.0)
    assert response(Station(2.0, 1.0, 8), 9.0, 3, 1) == pytest.approx(4.0)
    assert response(Station(2.0, 1.0, 2), 9.0, 3, 1) == pytest.approx(11 / 3)


def test_equal_answers_come_back_as_far_apart_as_they_left() -> None:
    """Three clients, 2 s each, away for 10 s: they leave at 2, 4, 6, return at 12, 14, 16 and meet nobody.

    First round 4 on average, second 2: 3.
    """
    assert response(Station(2.0, 2.0, 1), 10.0, 3, 2) == pytest.approx(3.0)


def test_who_is_back_early_waits_for_the_rest_of_the_wave() -> None:
    """The same, away for 1 s: they leave at 2, 4, 6 and return at 3, 5, 7, while the station is busy until 6.

    It takes them at 6, 8, 10, so that they end at 8, 10, 12: 5 s each. (2 + 4 + 6 + 3 x 5) / 6 = 4.5.
    """
    assert response(Station(2.0, 2.0, 1), 1.0, 3, 2) == pytest.approx(4.5)


@given(SECONDS, SECONDS, st.integers(1, 20), st.integers(1, 4), st.floats(0.1, 1.0))
def test_bounds(alone: float, think: float, clients: int, rounds: int, shortest: float) -> None:
    """No prompt is faster than alone, none waits for more than one prompt of every other client."""
    found = response(Station(alone, alone, 1), think, clients, rounds, shortest)
    assert alone * (1 - 1e-6) <= found <= alone * clients * (1 + 1e-6)
