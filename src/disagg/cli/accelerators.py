"""`disagg accelerators`: what the catalogue knows of devices, each figure with its source."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.accelerators import accelerators, find_accelerator
from disagg.catalog.figure import Figure
from disagg.catalog.figure_list import description, figures
from disagg.catalog.precision import Dtype
from disagg.catalog.quantity import format_quantity
from disagg.units import printable

EXAMPLES = """\
examples:
  disagg accelerators
  disagg accelerators mi300x
  disagg accelerators h100-sxm --json > mine.json     # a description to edit, and to give as --accelerator mine.json

`disagg calibrate-host` describes this machine's own processor.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well.

    Raises:
        ConfigError: If there is no such device, or its description is wrong.
    """
    args = _parser().parse_args(argv)
    found = [find_accelerator(args.name)] if args.name else list(accelerators().values())
    if args.json:
        rows = [description(entry) for entry in found]
        print(json.dumps(rows[0] if args.name else {"accelerators": rows}, indent=2))
    elif args.name:
        _detail(found[0])
    else:
        _list(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg accelerators",
        description="List the devices that sizing knows, or show one with the source of every figure.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a device: its name, or the path of its description")
    parser.add_argument("--json", action="store_true", help="print it for programs, in the form of a description")
    return parser


def _list(found: Sequence[Accelerator]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("accelerator", no_wrap=True)
    for name in ("16 bit", "FP8", "INT8", "4 bit", "GiB", "GB/s", "link", "W"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found:
        peak = entry.peak
        table.add_row(
            entry.name,
            _scaled(peak.get(Dtype.BF16) or peak.get(Dtype.FP16) or peak.get(Dtype.FP32), 1e12),
            _scaled(peak.get(Dtype.FP8), 1e12),
            _scaled(peak.get(Dtype.INT8), 1e12),
            _scaled(peak.get(Dtype.NVFP4) or peak.get(Dtype.MXFP4), 1e12),
            _scaled(entry.memory, 2.0**30),
            _scaled(entry.bandwidth, 1e9),
            _scaled(entry.scale_up.bandwidth if entry.scale_up is not None else None, 1e9),
            _scaled(entry.watts, 1.0),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "16 bit to 4 bit: dense peaks in TFLOP/s or TOP/s. link: GB/s per direction inside a node.", style="dim"
    )
    console.print("`disagg accelerators NAME` shows every figure with its source.", style="dim")


def _scaled(figure: Figure | None, unit: float) -> str:
    if figure is None:
        return ""
    value = figure.value / unit
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _detail(entry: Accelerator) -> None:
    console = Console(markup=False, highlight=False)
    console.print(printable(f"{entry.name}, {entry.vendor}"), style="bold")
    if entry.aliases:
        console.print(printable(f"also found as {', '.join(entry.aliases)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("figure", "left"), ("value", "right"), ("origin", "left"), ("source", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    sources: dict[str, int] = {}

    def number(source: str) -> str:
        return f"[{sources.setdefault(source, len(sources) + 1)}]"

    for named in figures(entry):
        value = format_quantity(named.figure.value, named.kind)
        table.add_row(named.path, value, str(named.figure.origin), number(named.figure.source))
    for name, curves in entry.collectives.items():
        for curve in curves:
            largest = curve.sizes[-1] / curve.seconds[-1]
            span = f"{curve.seconds[0] * 1e6:.3g} us .. {largest / 1e9:.4g} GB/s"
            table.add_row(f"{name}, {curve.devices} devices", span, str(curve.origin), number(curve.source))
    console.print(table)
    for source, index in sources.items():
        console.print(printable(f"[{index}] {source}"))
    for note in entry.notes:
        console.print(printable(f"note: {note}"))
