"""Each fault of an engine, on each leg, streamed or not: the client sees one ending and every book closes.

Two instances of a stage turn nearly all of it into an answer; one instance alone, or a fault that stays, gives one
error. `cluster` checks blocks, leases, legs, connections, words, usage and counters at the end of each case. The
cases of a test run at the same time, each with engines and a router of its own: most of their time is waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support.client import Ask, Ending
from tests.support.cluster import SETTINGS, body_of, cluster

# For cases that end because a limit does. Where one has to be answered, a busy machine must not be what ends it.
TIGHT: dict[str, Any] = {
    "prefill_timeout_s": 0.4,
    "first_token_timeout_s": 0.4,
    "idle_timeout_s": 0.3,
    "request_timeout_s": 2.0,
}
BROAD: dict[str, Any] = {
    "prefill_timeout_s": 15.0,
    "first_token_timeout_s": 15.0,
    "idle_timeout_s": 15.0,
    "request_timeout_s": 40.0,
}
FROZEN: dict[str, Any] = {
    "prefill_timeout_s": 1.0,
    "first_token_timeout_s": 1.0,
    "idle_timeout_s": 0.5,
    "request_timeout_s": 4.0,
}
FAULTS: dict[str, dict[str, Any]] = {
    "400": {"status": 400},
    "401": {"status": 401},
    "404": {"status": 404},
    "429": {"status": 429},
    "500": {"status": 500},
    "503": {"status": 503},
    "closes-after-headers": {"close_at_byte": 0},
    "closes-at-the-first-byte": {"close_at_byte": 1},
    "closes-in-the-middle": {"close_at_byte": 350},
    "silent-after-headers": {"hang_at_byte": 0},
    "silent-in-the-middle": {"hang_at_byte": 350},
    "never-answers": {"delay_s": 3600.0},
    "is-late": {"delay_s": 0.1},
}
SHORT = replace(SETTINGS, lease_s=1.0)
PATIENT = replace(SETTINGS, lease_s=2.5, handshake_timeout_s=2.0)
"""Nothing runs out while the machine is busy with something else."""
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
legs = pytest.mark.parametrize("leg", ["prefill-0", "decode-0"])


async def together(cases: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run cases at once; each failure names its case."""

    async def one(name: str, case: Coroutine[Any, Any, None]) -> None:
        try:
            await case
        except AssertionError as error:
            error.add_note(f"in the case {name}")
            raise

    async with asyncio.TaskGroup() as group:
        for name, case in cases.items():
            group.create_task(one(name, case))


@legs
@both_ways
async def test_a_fault_that_stays_ends_every_request_once(leg: str, stream: bool) -> None:
    """One instance of each stage, and one of them always fails like this."""
    await together({fault: _stays(fault, leg, stream) for fault in FAULTS})


async def _stays(fault: str, leg: str, stream: bool) -> None:
    begins = stream and leg == "decode-0" and "middle" in fault
    limits = TIGHT if fault.startswith(("silent", "never")) else BROAD
    if begins:
        # It is broken only if it began.
        limits = {**BROAD, "idle_timeout_s": TIGHT["idle_timeout_s"]}
    async with cluster(settings=SHORT if limits is TIGHT else PATIENT, retries=1, **limits) as c:
        c.nodes[leg].fault(**FAULTS[fault])
        results = await asyncio.gather(*(c.ask(stream=stream) for _ in range(3)))
        endings = {r.ending for r in results}
        if fault == "is-late":
            assert endings == {Ending.ANSWERED}
        elif fault[0] == "4":
            assert {r.status for r in results} == {int(fault)}
        elif begins:
            assert endings == {Ending.BROKEN}
        else:
            assert endings == {Ending.FAILED}
        # What is over is over: the next request is served as if nothing had been.
        c.nodes[leg].fault()
        assert (await c.ask(stream=stream)).ending in {Ending.ANSWERED, Ending.FAILED}


@legs
@both_ways
async def test_a_fault_that_passes_is_not_seen_by_the_client(leg: str, stream: bool) -> None:
    """Two instances of each stage: before the first byte the other one takes over, prefilled afresh."""
    await together({fault: _passes(fault, leg, stream) for fault in FAULTS if fault[0] in "5ci"})


async def _passes(fault: str, leg: str, stream: bool) -> None:
    seen_anyway = stream and leg == "decode-0" and fault == "closes-in-the-middle"
    async with cluster(2, 2, settings=PATIENT, **BROAD) as c:
        c.nodes[leg].fault(**FAULTS[fault], requests=1)
        results = [await c.ask(stream=stream) for _ in range(3)]
        broken = [r for r in results if r.ending is Ending.BROKEN]
        assert len(broken) == seen_anyway
        assert {r.ending for r in results if r not in broken} == {Ending.ANSWERED}


@pytest.mark.parametrize("leg", ["prefill-0", "decode-0", "both"])
@both_ways
async def test_a_client_that_leaves_engines_that_are_slow_leaves_nothing(leg: str, stream: bool) -> None:
    """In whatever phase the request is: queued, prefilled, transferred, begun."""
    phases = (0.0, 0.02, 0.06, 0.12, 0.2)
    await together({f"after {phase} s": _leaves(phase, leg, stream) for phase in phases})


async def _leaves(phase: float, leg: str, stream: bool) -> None:
    async with cluster(settings=SHORT, **TIGHT) as c:
        for name, node in c.nodes.items():
            if leg in {name, "both"}:
                node.fault(delay_s=0.05, transfer_s=0.05)
        asks = [Ask(body_of(stream=stream, max_tokens=200), leave_after_s=phase) for _ in range(6)]
        await asyncio.gather(*(c.ask(a) for a in asks))


@pytest.mark.parametrize("kind", ["crash", "freeze", "restart"])
@legs
@both_ways
async def test_a_process_that_fails_in_any_phase(kind: str, leg: str, stream: bool) -> None:
    """One request is caught in that phase; it ends once, in time, and the fleet serves the next one."""
    moments = ("queued", "prefill", "transfer", "decode")
    await together({moment: _fails(kind, moment, leg, stream) for moment in moments})


async def _fails(kind: str, moment: str, leg: str, stream: bool) -> None:
    settings, limits = (SHORT, FROZEN) if kind == "freeze" else (PATIENT, BROAD)
    async with cluster(2, 2, settings=settings, **limits) as c:
        slow = {"queued": ("prefill", {"delay_s": 0.1}), "transfer": ("decode", {"transfer_s": 0.1})}
        if moment in slow:
            stage, fields = slow[moment]
            for node in c.nodes.values():
                if node.stage == stage:
                    node.fault(**fields)
        task = asyncio.create_task(c.ask(stream=stream, max_tokens=1500 if moment == "decode" else 12))
        for _ in range(400):
            if any(reached(node.instance.core.engine, moment) for node in c.nodes.values()):
                break
            await asyncio.sleep(0.001)
        node = c.nodes[leg]
        if kind == "freeze":
            node.freeze()
        else:
            await node.crash(told=kind == "crash")
        if kind == "restart":
            await node.start()
        result = await task
        assert result.ending in {Ending.ANSWERED, Ending.FAILED, Ending.BROKEN}
        if leg not in result.instances:
            assert result.ending is Ending.ANSWERED, result
        node.thaw()
        for other in c.nodes.values():
            if other.up:
                other.fault()
        assert (await c.ask(stream=stream)).ending is Ending.ANSWERED


def reached(engine: Any, moment: str) -> bool:
    """Whether a request is in this phase on an engine."""
    if moment == "decode":
        return engine.settings.role == "consumer" and bool(engine.running)
    if moment == "transfer":
        return bool(engine.loading)
    return engine.settings.role == "producer" and (moment == "queued" or bool(engine.counters.prompt_tokens))
