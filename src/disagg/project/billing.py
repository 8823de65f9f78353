"""What tokens cost."""

from __future__ import annotations

from disagg.cost.work import Array

_TOKENS = 1e6
_SECONDS_PER_HOUR = 3600.0


def per_million(*, price_per_hour: float, devices: Array | int, tokens_per_second: Array) -> Array:
    """Price of a million tokens.

    Args:
        price_per_hour: Price of one device for an hour.
        devices: Devices that are paid for, those of every pool.
        tokens_per_second: Tokens that they make together.
    """
    return price_per_hour * devices / _SECONDS_PER_HOUR / tokens_per_second * _TOKENS
