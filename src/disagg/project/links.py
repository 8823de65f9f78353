"""What carries the KV cache, from presets, flags or the file's link section."""

from __future__ import annotations

from disagg.cost.memory import GIB
from disagg.errors import ConfigError, Problem
from disagg.project.transfer import TransferLink
from disagg.topology.spec import Topology

# GiB/s and microseconds: InferaSim's presets of the same names.
PRESETS: dict[str, tuple[float, float]] = {"nixl": (400.0, 5.0), "mooncake": (200.0, 10.0), "mori": (300.0, 7.0)}
# InferaSim's default: a pod link of 50 GiB/s at an efficiency of 0.7.
_DEFAULT_GIB = 35.0
_BITS_PER_BYTE = 8.0


def link_of(topology: Topology) -> TransferLink:
    """The link that a projection charges.

    Flags win over a preset, which wins over the file's link section, which wins over the default.

    Raises:
        ConfigError: If bandwidth is given both in the link section and by a flag of the projection.
    """
    settings, link = topology.projection, topology.link
    if settings.kv_transfer_bw_gbps is not None and link.bandwidth_gbps is not None:
        said = f"{link.bandwidth_gbps:g} Gbit/s there and {settings.kv_transfer_bw_gbps:g} GiB/s here"
        advice = "give one of them"
        raise ConfigError([Problem("link.bandwidth_gbps, projection.kv_transfer_bw_gbps", f"{said}; {advice}")])
    bandwidth, latency = _DEFAULT_GIB * GIB, 0.0
    source = "default: a pod link of 50 GiB/s at 0.7"
    if link.bandwidth_gbps is not None:
        bandwidth, source = link.bandwidth_gbps * 1e9 / _BITS_PER_BYTE, "link.bandwidth_gbps"
    if link.latency_s is not None:
        latency = link.latency_s
    if settings.transfer_backend is not None:
        gib, micros = PRESETS[settings.transfer_backend]
        bandwidth, latency, source = gib * GIB, micros / 1e6, f"preset {settings.transfer_backend}"
    if settings.kv_transfer_bw_gbps is not None:
        bandwidth, source = settings.kv_transfer_bw_gbps * GIB, "--kv-transfer-bw-gbps"
    if settings.kv_transfer_latency_us is not None:
        latency = settings.kv_transfer_latency_us / 1e6
    return TransferLink(bandwidth, latency, source)
