"""A projection for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.cost.memory import MemoryPlan
from disagg.project.compare import COMPARED, Comparison
from disagg.project.result import Projection
from disagg.project.sensitivity import Variant


def as_json(projection: Projection) -> dict[str, Any]:
    """Plain data: each figure with its unit, how it is made and what it rests on."""
    return {
        "mode": projection.mode,
        "figures": {
            name: {"value": q.value, "unit": q.unit, "how": q.how, "basis": q.basis.value}
            for name, q in projection.figures.items()
        },
        "first_token_ms": dict(projection.first_token),
        "decode_step_ms": dict(projection.decode_step),
        "prefill_ms": dict(projection.prefill),
        "memory": {stage.value: _memory(plan) for stage, plan in projection.memory.items()},
        "limit": projection.limit,
        "warnings": list(projection.warnings),
        "notes": list(projection.notes),
    }


def variants_as_json(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """What single changes would do; the first one is none."""
    return [
        {
            "change": one.name,
            "refused": one.refused,
            "devices": one.devices,
            "ttft_ms": one.ttft_ms,
            "itl_ms": one.itl_ms,
            "max_sustainable_request_rate": one.request_rate,
            "total_throughput_tps_per_gpu": one.tokens_per_device,
        }
        for one in variants
    ]


def comparison_as_json(pair: Comparison) -> dict[str, Any]:
    """Both ways of using the same devices."""
    return {
        "disaggregated": as_json(pair.split),
        "colocated": as_json(pair.together),
        "baseline": pair.baseline,
        "change": {name: pair.change(name) for name in COMPARED},
        "verdict": pair.verdict,
        "reason": pair.reason,
    }


def _memory(plan: MemoryPlan) -> dict[str, Any]:
    """Bytes of the fullest device."""
    return {
        "weights": dict(plan.weights),
        "kv": float(plan.kv),
        "kv_per_sequence": float(plan.per_sequence),
        "activations": plan.activations,
        "reserve": plan.reserve,
        "total": float(plan.total),
        "capacity": plan.capacity,
        "usable": plan.usable,
        "fits": bool(plan.fits),
        "most_sequences": float(plan.most_sequences),
    }
