"""This project's router in front of the static backends: `python -m benchmarks.own_router PREFILL DECODE WORKERS`.

Metrics, admission and prefix affinity are on, as in a deployment. It prints its port and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from disagg.engines.vllm.dialect_pull import PullDialect
from disagg.router.config import RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.garbage import look_less_often
from disagg.router.workers import make_entrance
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage


async def _serve(prefill: int, decode: int, workers: int) -> None:
    fleet = Fleet((Stage.PREFILL, Stage.DECODE))
    for stage, port in ((Stage.PREFILL, prefill), (Stage.DECODE, decode)):
        fleet.add(f"{stage}-0", stage, f"http://127.0.0.1:{port}", stage)
        fleet.mark(f"{stage}-0", stage, State.READY)
    spec = RouterSpec(workers=workers, prefill_policy="prefix-affinity")
    router = make_entrance(RouterConfig(("m",), spec, access_log=False), PullDialect(), fleet)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await router.start("127.0.0.1", 0)
    print(router.port, flush=True)
    await stop.wait()
    await router.stop()


if __name__ == "__main__":
    look_less_often()
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
