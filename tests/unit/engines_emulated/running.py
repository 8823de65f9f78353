"""Emulated engines on a thread of their own, so that plain blocking clients can test them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import EngineSettings, Pace, Role, SimplePace
from tests.support.wire import request

T = TypeVar("T")
ANYWHERE = Addresses("127.0.0.1", 0, "127.0.0.1", 0)
SETTINGS = EngineSettings(
    model="toy",
    served_model_names=("toy",),
    engine_id="engine-a",
    num_blocks=512,
    max_model_len=2048,
    handshake_timeout_s=0.3,
)


@dataclass(frozen=True, slots=True)
class Running:
    """Instances that are up, and the loop that they live in."""

    instances: Sequence[Instance]
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine where the engines run."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=30)

    def url(self, index: int = 0) -> str:
        return self.instances[index].url

    def state(self, index: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = request(self.url(index), "/emulated/state").json()
        return answer


@contextmanager
def running(*settings: EngineSettings, pace: Pace | None = None) -> Iterator[Running]:
    """One instance per settings object, on free ports, until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    instances = [Instance(given, pace or SimplePace(), ANYWHERE) for given in settings]
    up = Running(instances, loop)
    try:
        for instance in instances:
            up.call(instance.start())
        yield up
    finally:
        for instance in instances:
            up.call(instance.stop())
        up.call(_last_turns())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _last_turns() -> None:
    """What was accepted just before the end still gets closed."""
    for _ in range(10):
        await asyncio.sleep(0)


def pair(
    prefill: EngineSettings = SETTINGS, decode: EngineSettings = SETTINGS
) -> tuple[EngineSettings, EngineSettings]:
    """Settings of a prefill and a decode engine, each its own incarnation."""
    return (
        replace(prefill, role=Role.PRODUCER, engine_id="prefill-incarnation"),
        replace(decode, role=Role.CONSUMER, engine_id="decode-incarnation"),
    )
