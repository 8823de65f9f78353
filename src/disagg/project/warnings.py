"""What a reader of a projection should think about before building on it."""

from __future__ import annotations

from collections.abc import Iterator

from disagg.catalog.figure import Origin
from disagg.project.capacity import Capacity
from disagg.project.outcome import Outcome
from disagg.project.setup import Setup, has_experts
from disagg.topology.spec import Stage

# Below this share of a token's time there is little that a split could win back.
SMALL_LIFT = 0.05


def warnings_of(setup: Setup, held: Capacity, outcome: Outcome) -> tuple[str, ...]:
    """One sentence for each thing that is odd about a topology at its operating point."""
    return (
        *_interference(setup, outcome),
        *_transfer(setup, outcome),
        *_capacity(held),
        *_experts(setup),
        *_defaults(setup),
    )


def _interference(setup: Setup, outcome: Outcome) -> Iterator[str]:
    lift = float(outcome.lift)
    if not setup.split and lift < SMALL_LIFT:
        yield (
            f"Prompts make a token take only {lift * 100:.1f} % longer than pure decode would: separate pools are "
            "unlikely to pay for the KV transfer."
        )


def _transfer(setup: Setup, outcome: Outcome) -> Iterator[str]:
    # One request's transfer beside one prompt: under load a prefill holds many.
    if setup.split and float(outcome.transfer) > float(outcome.alone):
        yield "The KV transfer takes longer than the prefill of one prompt: a faster link, or no split, comes first."


def _capacity(held: Capacity) -> Iterator[str]:
    if held.capped:
        yield (
            f"{held.asked} requests at once were asked for, and {held.used:.0f} fit: the {held.ceiling} pool is the "
            "ceiling."
        )
    elif held.asked is not None and held.used > 0.9 * held.sustainable:
        yield f"The {held.ceiling} pool is all but full: it holds {held.sustainable:.0f} requests at most."
    if held.asked is None:
        yield (
            f"No --max-concurrency was given: the projection is for the {held.used:.0f} requests that the "
            f"{held.ceiling} pool holds, where waiting is longest."
        )


def _experts(setup: Setup) -> Iterator[str]:
    if has_experts(setup.model):
        return
    for stage in setup.pools:
        pool = setup.topology.pool(stage)
        if pool is not None and pool.parallel.expert > 1:
            size = pool.parallel.expert
            yield f"{setup.model.name} has no experts: {stage} expert parallelism {size} changes nothing."


def _defaults(setup: Setup) -> Iterator[str]:
    named = {pool.replica.accelerator.name: pool.replica.accelerator for pool in setup.pools.values()}
    for device in named.values():
        loose = sum(figure.origin is Origin.DEFAULT for figure in device.efficiency.values())
        if device.efficiency and loose == len(device.efficiency):
            yield f"Nobody has measured how close {device.name} comes to its peaks: the efficiencies are defaults."
    if setup.split and setup.link is not None and setup.link.source.startswith("default"):
        yield f"The link is a default ({setup.link.source}); give --kv-transfer-bw-gbps or link.bandwidth_gbps."


def limit_reason(setup: Setup, outcome: Outcome) -> str:
    """Which pool limits the request rate, in words."""
    rate = float(outcome.request_rate)
    if not setup.split:
        if bool(outcome.prefill_limits):
            return f"prompts: every step holds a piece of one, {rate:.3g} req/s are all that can be computed"
        return f"decode: {rate:.3g} req/s with these many requests at once"
    inputs, outputs = float(setup.workload.input_tokens), float(setup.workload.output_tokens)
    prefill = float(outcome.prefill_rate) / inputs
    decode = float(outcome.decode_capacity) / outputs
    slow, fast = (Stage.PREFILL, Stage.DECODE) if prefill < decode else (Stage.DECODE, Stage.PREFILL)
    low, high = sorted((prefill, decode))
    pool = setup.pools[slow]
    return (
        f"the {slow} pool ({pool.replicas} x {pool.replica.shape.devices} devices): {low:.3g} req/s, where {fast} "
        f"could do {high:.3g}"
    )
