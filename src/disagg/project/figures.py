"""From an outcome at one operating point to figures with stable names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from disagg.catalog.figure import Origin
from disagg.cost.decode import decode
from disagg.cost.memory import GIB
from disagg.cost.prefill import prefill
from disagg.cost.work import Array, Estimate, decode_work, prompt_work
from disagg.project.billing import per_million
from disagg.project.capacity import Capacity, capacity, memory_of
from disagg.project.open_loop import OpenLoop
from disagg.project.outcome import Outcome
from disagg.project.pricing import basis_of
from disagg.project.result import Basis, Projection, Quantity
from disagg.project.run import solve
from disagg.project.setup import PoolSetup, Setup
from disagg.project.shares import share_out
from disagg.project.warnings import limit_reason, warnings_of
from disagg.topology.spec import Stage

_MS = 1e3
_PERCENT = 100.0


def project(setup: Setup) -> Projection:
    """Project a setup at its own operating point.

    Raises:
        ConfigError: If a pool does not hold a single request, or a figure is missing.
    """
    held = capacity(setup)
    outcome = solve(setup, np.asarray(held.used))
    figures = {
        **_latency(outcome),
        **_throughput(setup, outcome),
        **_interference(outcome),
        **_pools(setup, outcome),
        **_capacity(setup, held),
        **_load(setup, outcome),
        **_price(setup, outcome),
    }
    step, prompt = _estimates(setup, held)
    figures = _with_bases(figures, setup, held)
    return Projection(
        mode="disaggregated" if setup.split else "colocated",
        figures=figures,
        first_token={name: _ms(part) for name, part in outcome.first_token.items()},
        decode_step={name: _ms(part) for name, part in step.parts.items()},
        prefill={name: _ms(part) for name, part in prompt.parts.items()},
        memory={
            stage: memory_of(setup, pool, _per_replica(held.used, pool.replicas))
            for stage, pool in setup.pools.items()
            if stage is not Stage.ENCODE
        },
        limit=limit_reason(setup, outcome),
        warnings=warnings_of(setup, held, outcome),
        notes=tuple(dict.fromkeys((*setup.model.notes, *step.notes, *prompt.notes))),
    )


_FROM_DECODE = (
    "itl_ms",
    "tpot_ms",
    "decode_total_ms",
    "per_request_decode_tps",
    "decode_step_latency_ms",
    "pure_step_latency_ms",
    "decode_throughput_tps",
    "decode_throughput_tps_per_gpu",
)
_FROM_PREFILL = ("prefill_compute_ttft_ms", "prefill_throughput_tps")
_FROM_BOTH = (
    "ttft_ms",
    "request_latency_ms",
    "mixed_step_latency_ms",
    "mixed_step_fraction_pct",
    "tpot_pollution_pct",
    "tpot_lift_pct",
    "total_throughput_tps_per_gpu",
    "max_sustainable_request_rate",
    "limiting_pool",
)
# From the loosest to the firmest.
_FIRMNESS = (Basis.MODELLED, Basis.TRANSPORTED, Basis.MEASURED)


def _with_bases(figures: dict[str, Quantity], setup: Setup, held: Capacity) -> dict[str, Quantity]:
    """Say of each figure whether the step times that it is made of are modelled, measured, or carried over."""
    before, after = deciding(setup)
    work = setup.workload
    share = np.asarray(_per_replica(held.used, after.replicas))
    step = basis_of(after.pricer, decode_work(share, work.input_tokens + work.output_tokens / 2))
    prompt = basis_of(before.pricer, prompt_work(np.ones(()), work.new_tokens, work.cached_tokens))
    looser = min(step, prompt, key=_FIRMNESS.index)
    bases = {
        **dict.fromkeys(_FROM_DECODE, step),
        **dict.fromkeys(_FROM_PREFILL, prompt),
        **dict.fromkeys(_FROM_BOTH, looser),
    }
    return {name: replace(q, basis=bases[name]) if name in bases else q for name, q in figures.items()}


def _ms(seconds: Array) -> float:
    return float(seconds) * _MS


def _per_replica(requests: float, replicas: int) -> float:
    return float(share_out(np.asarray(requests), replicas).largest)


def deciding(setup: Setup) -> tuple[PoolSetup, PoolSetup]:
    """The pools that prefill and that decode; the same one where there is no split."""
    together = setup.pools.get(Stage.COLOCATED)
    return (
        setup.pools.get(Stage.PREFILL) or together or setup.pools[Stage.DECODE],
        setup.pools.get(Stage.DECODE) or together or setup.pools[Stage.PREFILL],
    )


def _estimates(setup: Setup, held: Capacity) -> tuple[Estimate, Estimate]:
    """A decode step at the operating point, and one prompt alone, with their parts."""
    before, after = deciding(setup)
    work = setup.workload
    share = np.asarray(_per_replica(held.used, after.replicas))
    step = decode(after.pricer, share, work.input_tokens, work.output_tokens, float(work.step_tokens))
    prompt = prefill(before.pricer, np.ones(()), work.new_tokens, work.cached_tokens, chunk=before.chunking.chunk)
    return step, prompt


def _latency(outcome: Outcome) -> dict[str, Quantity]:
    itl = float(outcome.itl)
    return {
        "ttft_ms": Quantity(_ms(outcome.ttft), "ms", "sum of what the first token waits for"),
        "prefill_compute_ttft_ms": Quantity(
            _ms(outcome.first_token["prefill"]), "ms", "prefill of the prompts that a replica holds at a time"
        ),
        "kv_transfer_ms": Quantity(_ms(outcome.transfer), "ms", "KV bytes of one request / link bandwidth + latency"),
        "itl_ms": Quantity(_ms(outcome.itl), "ms", "decode total / (output tokens - 1) + detokenisation"),
        "tpot_ms": Quantity(_ms(outcome.tpot), "ms", "time of the engine per output token of a request"),
        "decode_total_ms": Quantity(_ms(outcome.decode_total), "ms", "from the first token to the last"),
        "request_latency_ms": Quantity(_ms(outcome.latency), "ms", "TTFT + decode total + detokenisation"),
        "per_request_decode_tps": Quantity(1 / itl if itl else 0.0, "tok/s", "1 / ITL"),
        "decode_step_latency_ms": Quantity(_ms(outcome.step), "ms", "a step of the replica that holds most requests"),
    }


def _throughput(setup: Setup, outcome: Outcome) -> dict[str, Quantity]:
    decode_rate, both = float(outcome.decode_rate), _both_rate(setup, outcome)
    decoding = deciding(setup)[1].devices
    return {
        "decode_throughput_tps": Quantity(decode_rate, "tok/s", "output tokens of all replicas, capped by prefill"),
        "decode_throughput_tps_per_gpu": Quantity(decode_rate / decoding, "tok/s", "over the devices that decode"),
        "total_throughput_tps_per_gpu": Quantity(both / setup.devices, "tok/s", "input and output over all devices"),
        "prefill_throughput_tps": Quantity(float(outcome.prefill_rate), "tok/s", "prompt tokens of all replicas"),
        "max_sustainable_request_rate": Quantity(float(outcome.request_rate), "req/s", "the slower pool's rate"),
    }


def _both_rate(setup: Setup, outcome: Outcome) -> float:
    lengths = float(setup.workload.input_tokens + setup.workload.output_tokens)
    return float(outcome.decode_rate) * lengths / float(setup.workload.output_tokens)


def _interference(outcome: Outcome) -> dict[str, Quantity]:
    return {
        "pure_step_latency_ms": Quantity(_ms(outcome.step), "ms", "a step that only decodes"),
        "mixed_step_latency_ms": Quantity(
            _ms(outcome.mixed_step), "ms", "a step that also holds a piece of a prompt"
        ),
        "mixed_step_fraction_pct": Quantity(
            float(outcome.mixed_fraction) * _PERCENT, "%", "mixed steps / all steps of a window"
        ),
        "tpot_pollution_pct": Quantity(
            float(outcome.pollution) * _PERCENT, "%", "share of the time that goes into mixed steps"
        ),
        "tpot_lift_pct": Quantity(
            float(outcome.lift) * _PERCENT, "%", "by how much longer a token takes than in pure decode"
        ),
    }


def _pools(setup: Setup, outcome: Outcome) -> dict[str, Quantity]:
    before, after = deciding(setup)
    counted = Basis.COUNTED
    limits = bool(outcome.prefill_limits)
    names = (Stage.PREFILL, Stage.DECODE) if setup.split else (Stage.COLOCATED, Stage.COLOCATED)
    return {
        "is_disaggregated": Quantity(setup.split, "", "prefill and decode have pools of their own", counted),
        "limiting_pool": Quantity(names[0 if limits else 1].value, "", "the pool with the smaller request rate"),
        "prefill_occupancy": Quantity(float(outcome.occupancy), "requests", "prompts that a prefill replica holds"),
        "prefill_replicas": Quantity(before.replicas, "", "", counted),
        "decode_replicas": Quantity(after.replicas, "", "", counted),
        "prefill_replica_gpus": Quantity(before.replica.shape.devices, "GPUs", "devices of one replica", counted),
        "decode_replica_gpus": Quantity(after.replica.shape.devices, "GPUs", "devices of one replica", counted),
        "replica_gpus": Quantity(setup.devices, "GPUs", "devices of all pools", counted),
        "speculative_tokens_per_step": Quantity(setup.workload.tokens_per_step, "tokens", "1 + a + ... + a^k"),
    }


def _capacity(setup: Setup, held: Capacity) -> dict[str, Quantity]:
    memory = setup.pools[held.ceiling].replica.accelerator.memory
    how = f"requests that the {held.ceiling} pool's memory and scheduler hold"
    asked = held.used if held.asked is None else float(held.asked)
    return {
        "concurrency": Quantity(
            asked,
            "requests",
            "asked for, else the most that fit",
            Basis.MODELLED if held.asked is None else Basis.GIVEN,
        ),
        "sustainable_concurrency": Quantity(held.sustainable, "requests", how),
        "concurrency_used": Quantity(held.used, "requests", "the smaller of the two"),
        "concurrency_capped": Quantity(held.capped, "", "more were asked for than fit"),
        "ceiling_pool": Quantity(held.ceiling.value, "", "the pool whose memory is the ceiling"),
        "hbm_capacity_gb": Quantity(
            memory.value / GIB,
            "GiB",
            memory.source,
            Basis.GIVEN if memory.origin is Origin.USER else Basis.CATALOGUE,
        ),
        "hbm_capacity_source": Quantity(f"{memory.origin}: {memory.source}", "", ""),
    }


def _load(setup: Setup, outcome: Outcome) -> dict[str, Quantity]:
    asked = setup.topology.workload
    if not asked.request_rate:
        return {}
    found: OpenLoop = outcome.under_load(asked.request_rate, deterministic=asked.arrival_model == "deterministic")
    wait = float(found.wait)
    return {
        "offered_request_rate": Quantity(asked.request_rate, "req/s", "--request-rate", Basis.GIVEN),
        "utilization": Quantity(float(found.utilization), "", "offered / sustainable"),
        "saturated": Quantity(bool(found.saturated), "", "the waiting line grows without end"),
        "queue_wait_ms": Quantity(wait * _MS, "ms", "M/M/1 wait, not part of TTFT"),
        "ttft_with_queue_ms": Quantity((wait + float(outcome.ttft)) * _MS, "ms", "TTFT + queue wait"),
        "request_latency_with_queue_ms": Quantity(
            (wait + float(outcome.latency)) * _MS, "ms", "end to end + queue wait"
        ),
    }


def _price(setup: Setup, outcome: Outcome) -> Mapping[str, Quantity]:
    price = setup.topology.projection.gpu_cost_per_hour
    if not price:
        return {}
    how = f"{price:g} per device and hour x {setup.devices} devices of every pool"
    output = per_million(price_per_hour=price, devices=setup.devices, tokens_per_second=outcome.decode_rate)
    both = per_million(
        price_per_hour=price, devices=setup.devices, tokens_per_second=np.asarray(_both_rate(setup, outcome))
    )
    return {
        "cost_per_million_output_tokens": Quantity(float(output), "$", how),
        "cost_per_million_tokens": Quantity(float(both), "$", f"{how}; input counted as well"),
    }
