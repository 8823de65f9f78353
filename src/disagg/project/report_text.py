"""A projection for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from disagg.project.result import Projection, Quantity


def render(projection: Projection, console: Console) -> None:
    """Print the report."""
    console.print(f"[bold]Projection: {projection.mode}[/bold]")
    table = Table("figure", "value", "how", box=None)
    for name, quantity in projection.figures.items():
        table.add_row(name, _value(quantity), quantity.how)
    console.print(table)
    _waterfall(console, "first token", projection.first_token)
    _waterfall(console, "decode step", projection.decode_step)
    for stage, plan in projection.memory.items():
        console.print(f"{stage}: {plan.verdict()}")


def _value(quantity: Quantity) -> str:
    value = quantity.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{value:,.4g} {quantity.unit}" if abs(value) < 1000 else f"{value:,.0f} {quantity.unit}"


def _waterfall(console: Console, title: str, parts: Mapping[str, float]) -> None:
    table = Table(title, "ms", box=None)
    for name, milliseconds in parts.items():
        if milliseconds:
            table.add_row(name, f"{milliseconds:.3f}")
    console.print(table)
