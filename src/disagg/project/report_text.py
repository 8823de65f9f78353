"""A projection for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from disagg.cost.memory import GIB, MemoryPlan
from disagg.project.compare import COMPARED, Comparison
from disagg.project.result import Projection, Quantity
from disagg.project.sensitivity import Variant

_BAR = 30
# Title, and the figures with the words that a reader sees. A figure that is absent is left out.
_SECTIONS: Sequence[tuple[str, Mapping[str, str]]] = (
    (
        "Load",
        {
            "concurrency_used": "Requests at once",
            "sustainable_concurrency": "Most that fit",
            "hbm_capacity_gb": "Device memory",
            "offered_request_rate": "Offered load",
            "utilization": "Utilisation",
            "saturated": "Saturated",
            "queue_wait_ms": "Queue wait (not in TTFT)",
            "ttft_with_queue_ms": "TTFT with queue",
        },
    ),
    (
        "Latency",
        {
            "ttft_ms": "Time to first token (TTFT)",
            "prefill_compute_ttft_ms": "  prefill",
            "kv_transfer_ms": "  KV transfer",
            "itl_ms": "Between tokens (ITL)",
            "tpot_ms": "Per output token (TPOT)",
            "per_request_decode_tps": "Interactivity, per user",
            "request_latency_ms": "End to end",
            "request_latency_with_queue_ms": "End to end with queue",
        },
    ),
    (
        "Steps",
        {
            "pure_step_latency_ms": "Step, decode only",
            "mixed_step_latency_ms": "Step with a piece of a prompt",
            "mixed_step_fraction_pct": "Share of such steps",
            "tpot_pollution_pct": "Pollution: share of time in them",
            "tpot_lift_pct": "Lift: a token takes longer by",
            "speculative_tokens_per_step": "Tokens per step",
        },
    ),
    (
        "Throughput",
        {
            "max_sustainable_request_rate": "Requests",
            "decode_throughput_tps": "Output tokens",
            "decode_throughput_tps_per_gpu": "  per decode device",
            "total_throughput_tps_per_gpu": "In + out, per device",
            "prefill_throughput_tps": "Prompt tokens, at most",
            "cost_per_million_output_tokens": "Per million output tokens",
            "cost_per_million_tokens": "Per million tokens, in + out",
        },
    ),
)


def render(projection: Projection, console: Console) -> None:
    """Print the report."""
    console.print(f"[bold]Projection: {projection.mode}[/bold], {_pools(projection)}")
    for title, names in _SECTIONS:
        rows = [(label, projection.figures[name]) for name, label in names.items() if name in projection.figures]
        if rows:
            _section(console, title, rows)
    console.print(f"[bold]Limit[/bold]: {projection.limit}")
    _waterfall(console, "What the first token waits for", projection.first_token)
    _waterfall(console, "What a decode step consists of", projection.decode_step)
    for stage, plan in projection.memory.items():
        _memory(console, stage.value, plan)
    for warning in projection.warnings:
        console.print(f"[yellow]note[/yellow]  {warning}")


def _pools(projection: Projection) -> str:
    figures = projection.figures
    if not figures["is_disaggregated"].value:
        each = figures["decode_replica_gpus"].value
        return f"{figures['decode_replicas'].value} replica(s) x {each} devices"
    parts = [
        f"{stage} {figures[f'{stage}_replicas'].value} replica(s) x {figures[f'{stage}_replica_gpus'].value} devices"
        for stage in ("prefill", "decode")
    ]
    return f"{', '.join(parts)}; {figures['replica_gpus'].value} in all"


def _section(console: Console, title: str, rows: Sequence[tuple[str, Quantity]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=34)
    table.add_column(justify="right", width=16)
    for label, quantity in rows:
        table.add_row(label, shown(quantity))
    console.print(f"[bold]{title}[/bold]")
    console.print(table)


def shown(quantity: Quantity) -> str:
    """A figure as people read it."""
    value = quantity.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    number = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
    return f"{number} {quantity.unit}".rstrip()


def _waterfall(console: Console, title: str, parts: Mapping[str, float]) -> None:
    whole = sum(parts.values())
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, milliseconds in parts.items():
        if whole and milliseconds / whole >= 0.0005:
            bar = "#" * max(1, round(_BAR * milliseconds / whole))
            table.add_row(name, f"{milliseconds:.3f} ms", bar)
    console.print(f"[bold]{title}[/bold]: {whole:.3f} ms")
    console.print(table)


def _memory(console: Console, stage: str, plan: MemoryPlan) -> None:
    parts = {
        **{f"weights: {name}": size for name, size in plan.weights.items()},
        "KV cache": float(plan.kv),
        "activations": plan.activations,
        "draft model": plan.draft,
        "reserve": plan.reserve,
    }
    console.print(f"[bold]Memory of a {stage} device[/bold]: {plan.verdict()}")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, size in parts.items():
        if size:
            table.add_row(name, f"{size / GIB:.2f} GiB", "#" * max(1, round(_BAR * size / plan.capacity)))
    console.print(table)


def render_variants(variants: Sequence[Variant], console: Console) -> None:
    """Print what single changes would do."""
    console.print("[bold]What one change would do[/bold]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", width=34)
    for title in ("devices", "TTFT ms", "ITL ms", "req/s", "tok/s each"):
        table.add_column(title, justify="right")
    for one in variants:
        if one.refused:
            table.add_row(one.name, "cannot be done")
            continue
        numbers = (one.ttft_ms, one.itl_ms, one.request_rate, one.tokens_per_device)
        table.add_row(one.name, str(one.devices), *(f"{n:,.0f}" if n >= 1000 else f"{n:.4g}" for n in numbers))
    console.print(table)


def render_comparison(pair: Comparison, console: Console) -> None:
    """Print both ways of using the same devices."""
    console.print(f"[bold]Separate pools[/bold]: {_pools(pair.split)}")
    console.print(f"[bold]Colocated[/bold]: {pair.baseline}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", width=34)
    for title in ("separate", "colocated", "change"):
        table.add_column(title, justify="right", width=16)
    labels = {name: label.strip() for _, names in _SECTIONS for name, label in names.items()}
    for name in (*COMPARED, "tpot_pollution_pct", "tpot_lift_pct"):
        change = f"{pair.change(name) * 100:+.1f} %" if name in COMPARED else ""
        table.add_row(labels[name], shown(pair.split.figures[name]), shown(pair.together.figures[name]), change)
    console.print(table)
    console.print(f"[bold]Limit[/bold]  separate: {pair.split.limit}")
    console.print(f"       colocated: {pair.together.limit}")
    console.print(f"[bold]Verdict[/bold]: {pair.verdict}; {pair.reason}.")
    for warning in dict.fromkeys((*pair.split.warnings, *pair.together.warnings)):
        console.print(f"[yellow]note[/yellow]  {warning}")
