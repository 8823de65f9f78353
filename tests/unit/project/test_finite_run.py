"""Runs of a load generator that starts all clients at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.project.closed_loop import response_time
from disagg.project.finite_run import burst_response, fixed_service_response, run_mean

SECONDS = st.floats(0.001, 10.0)


def one(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(value, dtype=np.float64)


def test_one_client_never_waits() -> None:
    """With nobody else the answer takes the service alone."""
    assert float(fixed_service_response(one(2.0), one(2.0), one(5.0), one(1))) == 2.0


def test_two_clients_by_hand() -> None:
    """Service 2, think 6: the other client is busy 2 of 8 s = 1/4 and queued 1/4 x 8 / 8 = 1/4 of a client.

    Half of its service is over when it is met: 2 + 2 x (1/4 - 1/8) = 2.25.
    """
    assert float(fixed_service_response(one(2.0), one(2.0), one(6.0), one(2))) == pytest.approx(2.25)


def test_many_clients_are_an_md1_queue() -> None:
    """20,000 clients, each away for 20,000 s, send 1 request/s less what waiting slows them down.

    Service 0.5 s, load 1/2: M/D/1 waits 0.5 x 0.5 / (2 x 0.5) = 0.25 s, the answer comes after 0.75 s.
    """
    found = float(fixed_service_response(one(0.5), one(0.5), one(20_000.0), one(20_000)))
    assert found == pytest.approx(0.75, rel=1e-3)


def test_a_full_station_gives_each_client_its_turn() -> None:
    """50 clients that are away for 1 s at a station of 0.5 s: it never idles, so a round takes 25 s, 24 of them here.

    The last one in the queue is met in mid-service, so the wait is half a service less at most.
    """
    found = float(fixed_service_response(one(0.5), one(0.5), one(1.0), one(50)))
    assert 23.5 <= found <= 24.0


@given(SECONDS, SECONDS, st.integers(1, 40))
def test_between_nothing_and_random_services(service: float, think: float, clients: int) -> None:
    """Fixed services never wait longer than random ones of the same mean, nor less than nothing."""
    fixed = float(fixed_service_response(one(service), one(service), one(think), one(clients)))
    random = float(response_time(one(service), one(service), one(think), one(clients)))
    assert service * (1 - 1e-12) <= fixed <= random * (1 + 1e-12)


def test_burst_and_run_by_hand() -> None:
    """Three batches of 2 s end after 2, 4, 6: 4 on average. Ten rounds with 1 s later: (4 + 9) / 10 = 1.3."""
    burst = burst_response(one(2.0), one(3.0))
    assert float(burst) == 4.0
    assert float(run_mean(burst, one(1.0), 10.0)) == pytest.approx(1.3)
    assert float(run_mean(burst, one(1.0), 1.0)) == 4.0
