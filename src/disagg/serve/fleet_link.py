"""From the launcher to the router: what happens to a process decides what its instance can be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from disagg.engines.base import Peer
from disagg.launch.instance import State as Life
from disagg.launch.member import View
from disagg.router.fleet import Fleet, State
from disagg.topology.instances import Instance

_SHOWN: Mapping[Life, State] = {
    Life.PLANNED: State.STARTING,
    Life.STARTING: State.STARTING,
    Life.HEALTHY: State.STARTING,
    Life.VERIFYING: State.STARTING,
    Life.READY: State.READY,
    # No new requests, but those that it has may still end well: an engine that does not answer may be busy.
    Life.SUSPECT: State.DRAINING,
    Life.STOPPING: State.DRAINING,
    Life.BACKOFF: State.DOWN,
    Life.STOPPED: State.DOWN,
    Life.FAILED: State.DOWN,
}


class FleetLink:
    """Keeps the router's fleet up to date.

    Args:
        fleet: Of the router; the instances are added to it.
        instances: Of the deployment. Services are not the router's business.
        peer: What other engines have to be told about a start of an instance, by its incarnation.
    """

    def __init__(self, fleet: Fleet, instances: Sequence[Instance], peer: Callable[[Instance, str], Peer]) -> None:
        self._fleet = fleet
        self._instances = {instance.name: instance for instance in instances}
        self._peer = peer
        for instance in instances:
            fleet.add(instance.name, instance.stage, instance.url, incarnation="")

    def on_state(self, view: View) -> None:
        """A process has changed."""
        instance = self._instances.get(view.name)
        if instance is None or not view.incarnation:
            return
        if view.state is Life.STARTING:
            self._fleet.update(view.name, view.incarnation, peer=self._peer(instance, view.incarnation))
        self._fleet.mark(view.name, view.incarnation, _SHOWN[view.state])
