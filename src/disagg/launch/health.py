"""Whether a member answers, asked again and again for as long as it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import UpstreamError, UpstreamUnreachableError
from disagg.http.client import Client
from disagg.launch.handoff_probe import is_healthy
from disagg.launch.instance import ALIVE, OVER, Answered, Event, Record, Silent, State, Tick
from disagg.launch.member import Member


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often and how long a member is asked, in seconds.

    Attributes:
        ready_s: Pause between two checks of a member that has answered.
        waiting_s: Pause between two looks at one that starts or waits for its restart.
        timeout_s: How long one check waits for its answer.
    """

    ready_s: float = 2.0
    waiting_s: float = 0.25
    timeout_s: float = 5.0


async def watch(
    member: Member, client: Client, rhythm: Rhythm, record: Callable[[], Record], feed: Callable[[Event], None]
) -> None:
    """Ask a member in its rhythm and feed what it says, until its life is over.

    Args:
        member: Whom to ask.
        client: Connections to use.
        rhythm: How often.
        record: What is known of the member now.
        feed: Takes the events.
    """
    while record().state not in OVER:
        feed(Tick())
        asked = record()
        if asked.state in ALIVE and asked.present:
            try:
                await check(member, client, rhythm.timeout_s)
            except UpstreamError as error:
                feed(Silent(asked.incarnation, error.message))
            else:
                feed(Answered(asked.incarnation))
        settled = record().state in (State.READY, State.SUSPECT)
        await asyncio.sleep(rhythm.ready_s if settled else rhythm.waiting_s)


async def check(member: Member, client: Client, timeout_s: float) -> None:
    """Ask once.

    Raises:
        UpstreamError: If there is no good answer.
    """
    if member.origin is not None:
        await is_healthy(client, member.origin, member.health_path, timeout_s)
        return
    for purpose, port in member.ports.items():
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, TimeoutError) as error:
            raise UpstreamUnreachableError(f"{purpose} port {port} accepts no connection.") from error
        writer.close()
