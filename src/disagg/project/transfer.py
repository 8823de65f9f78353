"""The KV cache's way from prefill to decode."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.cost.work import Array


@dataclass(frozen=True, slots=True)
class TransferLink:
    """What carries it.

    Attributes:
        bandwidth: Bytes/s.
        latency: Seconds before the first byte.
        source: Where these come from.
    """

    bandwidth: float
    latency: float
    source: str


def transfer_time(kv_bytes: Array, link: TransferLink) -> Array:
    """Seconds of one request's transfer over an idle link."""
    return kv_bytes / link.bandwidth + link.latency
