"""The published example of a colocated projection, recomputed to every digit that its page prints."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.project.billing import per_million
from disagg.project.closed_loop import response_time
from disagg.project.continuous import ContinuousBatch, continuous_batch

# InferaSim's page on projections: 32 clients, 1024 tokens in and out, one chunk per prompt, no speculation,
# a pure step of 13.68 ms, a mixed one of 38.90 ms, two GPUs at $2.50 an hour.
CLIENTS, TOKENS, PURE, MIXED, DEVICES, PRICE = 32.0, 1024.0, 13.68e-3, 38.90e-3, 2, 2.50


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


@pytest.fixture
def batch() -> ContinuousBatch:
    """The example's steady state."""
    return continuous_batch(
        clients=a(CLIENTS), output_tokens=a(TOKENS), chunks=a(1), pure=a(PURE), mixed=a(MIXED), tokens_per_step=a(1)
    )


def test_the_window_holds_the_steps_that_one_request_needs(batch: ContinuousBatch) -> None:
    """n_pure = (1024 - 31) / 32 = 31.03125; W = 31.03125 x 13.68 + 38.90 = 463.4075 ms."""
    assert float(batch.pure_steps) == pytest.approx(31.03125, rel=1e-12)
    assert float(batch.window) * 1e3 == pytest.approx(463.4075, abs=5e-5)


def test_mixed_fraction_pollution_and_lift_are_three_numbers(batch: ContinuousBatch) -> None:
    """1 / 32.03125 = 3.12195 % of the steps, 38.90 / 463.4075 = 8.39434 % of the time, 5.8588 % per token."""
    assert float(batch.mixed_fraction) * 100 == pytest.approx(3.12195, abs=5e-6)
    assert float(batch.pollution) * 100 == pytest.approx(8.39434, abs=5e-6)
    assert float(batch.lift) * 100 == pytest.approx(5.8588, abs=5e-5)


def test_time_per_token_and_throughput(batch: ContinuousBatch) -> None:
    """TPOT = 32 W / 1024 = 14.48148 ms; 1024 / W = 2209.718 tok/s; 32 W = 14 829.04 ms."""
    assert float(batch.tpot) * 1e3 == pytest.approx(14.48148, abs=5e-6)
    assert float(batch.throughput) == pytest.approx(2209.718, abs=5e-4)
    assert float(batch.decode_total) * 1e3 == pytest.approx(14829.04, abs=5e-3)


def test_first_token_under_both_rules(batch: ContinuousBatch) -> None:
    """42.32217 ms if a waiting client delays by a whole mixed step, 41.056 ms if only by its prompt's part.

    The page's prefill rate of 40 576.9 tok/s makes that part 1024 / 40 576.9 = 25.236 ms.
    """
    old = response_time(a(MIXED), a(MIXED), batch.decode_total, a(CLIENTS))
    new = response_time(a(MIXED), a(TOKENS / 40576.9), batch.decode_total, a(CLIENTS))
    assert float(old) * 1e3 == pytest.approx(42.32217, abs=5e-6)
    assert float(new) * 1e3 == pytest.approx(41.056, abs=5e-4)


def test_what_a_user_sees(batch: ContinuousBatch) -> None:
    """ITL = 14 829.04 / 1023 = 14.49564 ms, 68.986 tok/s, 14 871.362 ms from end to end."""
    itl = float(batch.decode_total) / (TOKENS - 1)
    assert itl * 1e3 == pytest.approx(14.49564, abs=5e-6)
    assert 1 / itl == pytest.approx(68.986, abs=5e-4)
    first = float(response_time(a(MIXED), a(MIXED), batch.decode_total, a(CLIENTS)))
    assert (first + float(batch.decode_total)) * 1e3 == pytest.approx(14871.362, abs=5e-4)


def test_price_of_a_million_tokens(batch: ContinuousBatch) -> None:
    """2 x $2.50 / 3600 / 2209.718 x 10^6 = $0.62854 for output, half of it with the prompt's tokens counted."""
    output = per_million(price_per_hour=PRICE, devices=DEVICES, tokens_per_second=batch.throughput)
    both = per_million(price_per_hour=PRICE, devices=DEVICES, tokens_per_second=batch.throughput * 2)
    assert float(output) == pytest.approx(0.62854, abs=5e-6)
    assert float(both) == pytest.approx(0.31427, abs=5e-6)


@pytest.mark.parametrize(
    ("service", "think", "clients", "milliseconds"),
    [(10, 0, 4, 40.0), (10, 90, 4, 13.5756), (100, 1000, 8, 209.0408), (100, 0, 8, 800.0)],
)
def test_a_closed_loop_answers_as_published(service: float, think: float, clients: int, milliseconds: float) -> None:
    """Four points of mean value analysis."""
    found = response_time(a(service / 1e3), a(service / 1e3), a(think / 1e3), a(clients))
    assert float(found) * 1e3 == pytest.approx(milliseconds, abs=5e-5)
