"""What there is at the moment of a scrape: engines, their states, connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from disagg.http.client import Client
from disagg.http.server import Server
from disagg.policy.breaker import Phase
from disagg.router.fleet import Fleet, State
from disagg.router.series import ENGINE, Gauge, Labels

Samples = Iterator[tuple[Labels, float]]


def fleet_gauges(fleet: Fleet, now: Callable[[], float]) -> tuple[Gauge, ...]:
    """Gauges over the members of a fleet; `now` gives monotonic seconds."""

    def in_flight() -> Samples:
        return (((m.stage, m.name), m.in_flight) for m in fleet.members())

    def info() -> Samples:
        return (((m.stage, m.name, m.url, m.incarnation), 1) for m in fleet.members())

    def states() -> Samples:
        return (((m.stage, m.name, state), m.shown_state is state) for m in fleet.members() for state in State)

    def breakers() -> Samples:
        for m in fleet.members():
            current = m.breaker.phase(now()) if m.breaker is not None else Phase.CLOSED
            for phase in Phase:
                yield (m.stage, m.name, phase), phase is current

    def missing() -> Samples:
        without = fleet.missing_stages()
        return (((stage,), stage not in without) for stage in fleet.needed)

    return (
        Gauge("disagg_legs_in_flight", "Legs open on an engine.", ("stage", ENGINE), in_flight),
        Gauge("disagg_stage_ready", "1 if a needed stage has a ready engine.", ("stage",), missing),
        Gauge(
            "disagg_engine_info",
            "1 for each engine, with its address and its incarnation, which changes with each start.",
            ("stage", ENGINE, "url", "incarnation"),
            info,
        ),
        Gauge("disagg_engine_state", "1 for the state that an engine is in.", ("stage", ENGINE, "state"), states),
        Gauge(
            "disagg_breaker_state", "1 for the state of an engine's breaker.", ("stage", ENGINE, "state"), breakers
        ),
    )


def connection_gauges(server: Server, client: Client) -> tuple[Gauge, ...]:
    """Gauges over the connections of a router."""

    def upstream() -> Samples:
        busy = client.busy_connections
        yield ("busy",), busy
        yield ("kept",), client.open_connections - busy

    return (
        Gauge(
            "disagg_client_connections",
            "Connections that clients have open.",
            (),
            lambda: [((), len(server.connections))],
        ),
        Gauge(
            "disagg_upstream_connections", "Connections to engines, in use or kept for later.", ("state",), upstream
        ),
    )
