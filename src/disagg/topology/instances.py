"""From pools to instances: names, devices and ports of everything that a topology starts."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.topology.spec import Stage

DEFAULT_PORTS: dict[Stage, int] = {
    Stage.COLOCATED: 9600,
    Stage.ENCODE: 9700,
    Stage.DECODE: 9800,
    Stage.PREFILL: 9900,
}
"""First HTTP port of a stage whose ports are not given (prefill and decode as in Qualcomm's launcher)."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine of one stage, with everything that is planned for it before it starts.

    Attributes:
        name: Unique in the topology and stable over restarts, such as ``prefill-0``.
        stage: The stage that it serves.
        index: Its place in the pool, from 0.
        devices: Device ids of its group, in the order written; empty if the platform needs none.
        host: Address of its HTTP server.
        port: Port of its HTTP server.
        side_channel_port: First of the ports that it reserves for the KV handoff.
        side_channel_ports: How many of them it reserves (one per data-parallel rank).
    """

    name: str
    stage: Stage
    index: int
    devices: tuple[int, ...]
    host: str
    port: int
    side_channel_port: int
    side_channel_ports: int = 1

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
