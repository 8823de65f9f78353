"""What takes the requests of a deployment, as whoever starts, steers and watches it sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg.http.origin import Origin
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, Member
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage


class Entrance(Protocol):
    """What takes the requests of a deployment: one router, or several processes of it."""

    async def start(self, host: str, port: int) -> None:
        """Take requests; port 0 takes a free one."""
        ...

    @property
    def port(self) -> int:
        """The port that requests come in on."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that clients have open."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way; whether all of them ended within so many seconds."""
        ...

    @property
    def config(self) -> RouterConfig:
        """Names, limits and modes that are in force."""
        ...

    @property
    def fleet(self) -> Fleet:
        """Who is there."""
        ...

    def change(self, spec: RouterSpec) -> tuple[list[str], list[str]]:
        """Take other settings; which have changed, and which only a restart changes."""
        ...

    def set_policy(self, stage: Stage, name: str) -> None:
        """Choose the instances of a stage by another policy from now on.

        Raises:
            ConfigError: If there is no policy of that name, or it needs what is only collected from the start.
        """
        ...

    def set_log_level(self, level: int) -> None:
        """Say more or less from now on."""
        ...

    def motion(self, origin: Origin) -> Callable[[], bool]:
        """A question to ask later: whether anything has come from an engine since now, in a request under way."""
        ...

    def settled(self, member: Member) -> bool:
        """Whether the counts of a member that takes no more requests are all that there will be."""
        ...

    async def stop(self) -> None:
        """End everything at once."""
        ...
