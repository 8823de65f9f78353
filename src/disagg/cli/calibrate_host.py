"""`disagg calibrate-host`: measure this machine's processor, and describe it as an accelerator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import Progress

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.figure_list import description
from disagg.catalog.host import HostFigures, host_accelerator
from disagg.catalog.precision import Dtype
from disagg.errors import ConfigError, Problem
from disagg.launch.host_speed import HostSpeed, measure, memory_bytes, processor_name, usable_threads

EXAMPLES = """\
examples:
  disagg calibrate-host
  disagg calibrate-host --threads 4 --output four-cores.yaml
  disagg project --model smollm2-135m --accelerator host.yaml --input-len 512 --output-len 128

One instance of an engine counts as one device, so measure with as many threads as an instance has cores.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well.

    Raises:
        ConfigError: If a flag is wrong, or the file is there already.
        PreparationError: If a measurement fails.
    """
    args = _parser().parse_args(argv)
    output = Path(args.output)
    _check(args.threads, output, force=args.force)
    speeds = _measure(args.threads, 0.2 if args.quick else 1.0)
    accelerator = _accelerator(output.stem, speeds)
    output.write_text(_yaml(accelerator), encoding="utf-8")
    if args.json:
        print(json.dumps(description(accelerator) | {"by_threads": [asdict(s) for s in speeds]}, indent=2))
        return 0
    for note in accelerator.notes:
        print(note)
    print(f"wrote {output}; give it as --accelerator {output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg calibrate-host",
        description="Measure this machine's processor, to size deployments that run on it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=usable_threads(), metavar="N", help="cores of an instance")
    parser.add_argument("--output", default="host.yaml", metavar="FILE", help="description to write (host.yaml)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--quick", action="store_true", help="measure for a fifth of the time")
    parser.add_argument("--json", action="store_true", help="print it for programs as well")
    return parser


def _check(threads: int, output: Path, *, force: bool) -> None:
    problems = []
    if not 1 <= threads <= usable_threads():
        problems.append(
            Problem(f"--threads {threads}", f"must be from 1 to the {usable_threads()} usable processors")
        )
    if output.suffix not in {".yaml", ".yml"}:
        problems.append(Problem(f"--output {output}", "must end in .yaml"))
    elif output.exists() and not force:
        problems.append(Problem(f"--output {output}", "is there already; give another name, or --force"))
    elif not output.absolute().parent.is_dir():
        problems.append(Problem(f"--output {output}", "is in a folder that does not exist"))
    if problems:
        raise ConfigError(problems)


def _measure(threads: int, seconds: float) -> list[HostSpeed]:
    """Measure with 1, 2, 4 ... threads, and with those asked for."""
    counts = sorted({threads, *(2**i for i in range(threads.bit_length()) if 2**i <= threads)})
    speeds = []
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("measuring", total=len(counts))
        for count in counts:
            progress.update(task, description=f"measuring with {count} threads")
            speeds.append(measure(count, seconds))
            progress.advance(task)
    return speeds


def _accelerator(name: str, speeds: Sequence[HostSpeed]) -> Accelerator:
    last = speeds[-1]
    peak = {Dtype.FP32: last.fp32} | ({Dtype.BF16: last.bf16} if last.bf16 is not None else {})
    how = f"{last.threads} threads, {last.library}, measured {datetime.now(UTC):%Y-%m-%d}"
    figures = HostFigures(last.threads, peak, last.copy, last.read, how)
    accelerator = host_accelerator(name, processor_name(), memory_bytes(), figures)
    return replace(accelerator, notes=tuple(_line(speed) for speed in speeds))


def _line(speed: HostSpeed) -> str:
    bf16 = "" if speed.bf16 is None else f", {speed.bf16 / 1e9:.4g} in BF16"
    return (
        f"{speed.threads} threads: {speed.fp32 / 1e9:.4g} GFLOP/s in FP32{bf16}, "
        f"copies {speed.copy / 1e9:.3g} GB/s, reads {speed.read / 1e9:.3g} GB/s"
    )


def _yaml(accelerator: Accelerator) -> str:
    text = yaml.safe_dump(description(accelerator), sort_keys=False, width=118, allow_unicode=True)
    return f"# Written by `disagg calibrate-host`. Figures are in bytes, bytes/s, FLOP/s and seconds.\n{text}"
