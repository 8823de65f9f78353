"""Runs instances in this process until a signal, or until the last of them is gone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence

import uvloop

from disagg.engines.emulated.instance import Instance


def run(main: Coroutine[None, None, int]) -> int:
    """Run a coroutine on the fast event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def serve(
    make: Callable[[Callable[[], None]], Sequence[Instance]],
    ready: Callable[[Sequence[Instance]], None],
    drain_s: float = 5.0,
) -> int:
    """Start instances, wait, stop them.

    Args:
        make: Makes the instances; each calls the function that is passed when it dies.
        ready: Called when all of them listen.
        drain_s: How long requests may go on after a first signal; a second signal ends at once.

    Returns:
        0 after a signal, 1 if all instances died.

    Raises:
        PreparationError: If a port cannot be bound.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, "signal")
    instances = make(lambda: signals.put_nowait("death"))
    alive = len(instances)
    try:
        for instance in instances:
            await instance.start()
        ready(instances)
        while alive:
            if await signals.get() == "signal":
                break
            alive -= 1
        if not alive:
            return 1
        drains = asyncio.gather(*(instance.drain(drain_s) for instance in instances))
        second = loop.create_task(signals.get())
        await asyncio.wait((drains, second), return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        drains.cancel()
        await asyncio.gather(drains, second, return_exceptions=True)
        return 0
    finally:
        for instance in instances:
            await instance.stop()
