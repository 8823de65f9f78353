"""Shares of the peaks that kernels reach, and curves of collectives, from tables of measured kernels.

The catalogue's efficiencies come from here. The tables are those of the package aiconfigurator-core 0.12.0
(ai-dynamo/aiconfigurator, Apache-2.0), `systems/data/<device>`, brought into one CSV per kind with the fastest kernel
of each shape: `<device>_gemm` (SGLang), `_context_attention_trtllm` and `_generation_attention_trtllm` (TensorRT-LLM,
head size 128, no window), `_moe` (any engine, tokens spread evenly, FP8 with one scale per block or per tensor), all
gzip, `_nccl` and `_custom_allreduce` (SGLang). Times in them are milliseconds, sizes of messages are elements.

Rules, each a median over the rows that it names:

- gemm: share of the peak, m, n and k of 4096 or more.
- weights: share of the bandwidth of weights, input and output, m of 16 or less, n k of 2^28 or more. Smaller weights
  would stay in the cache between repetitions, and what a kernel takes at least, which the cost model adds, would
  count as slow memory: with 2^25 or more a B200 seems to reach 0.60 of its bandwidth in 8 bits, not 0.72.
- prefill_attention: share of the peak, prompts of 4096 tokens or more, 32 or more heads over the batch, causal
  FLOPs: 2 b s^2 H d.
- decode_attention: share of the bandwidth, more than 256 MB of keys and values read. Rows above the bandwidth (they
  hit the cache) are left out; with more than one row in ten of that kind, only rows without shared heads count.
- grouped_gemm: share of the peak of a whole layer of experts (three matrices, spreading and gathering included) on
  one device, 512 tokens or more per expert.
- kernel_floor: seconds of the smallest product, the median over the rows with n k of 4096 or less and m = 1.
- collectives: half precision, sizes by powers of four; the engines' own all-reduce as captured in a graph.

Run: python -m benchmarks.kernel_efficiency FOLDER h100_sxm --peak bf16=989e12 fp8=1978e12 --bandwidth 3.35e12
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_NAMES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
_HEAD = 128


def _rows(file: Path) -> Iterator[Mapping[str, str]]:
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    yield from csv.DictReader(io.StringIO(text))


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def products(file: Path, peaks: Mapping[str, float], bandwidth: float) -> dict[str, dict[str, float | None]]:
    """Shares of large products and of streamed weights, by number format."""
    large: dict[str, list[float]] = {}
    streamed: dict[str, list[float]] = {}
    for row in _rows(file):
        name = _NAMES.get(row["gemm_dtype"], "")
        if name not in peaks:
            continue
        m, n, k = (int(row[field]) for field in ("m", "n", "k"))
        seconds = float(row["latency_ms"]) / 1e3
        if min(m, n, k) >= 4096:
            large.setdefault(name, []).append(2.0 * m * n * k / seconds / peaks[name])
        if m <= 16 and n * k >= 2**28:
            moved = n * k * _BYTES[name] + m * k * _BYTES[name] + m * n * 2.0
            streamed.setdefault(name, []).append(moved / seconds / bandwidth)
    return {
        "gemm": {name: _median(values) for name, values in large.items()},
        "weights": {name: _median(values) for name, values in streamed.items()},
    }


def experts(file: Path, peaks: Mapping[str, float]) -> dict[str, float | None]:
    """Share of the peak of layers of experts, by number format."""
    found: dict[str, list[float]] = {}
    for row in _rows(file):
        name = _NAMES.get(row["moe_dtype"], "")
        if name not in peaks or (row["moe_tp_size"], row["moe_ep_size"]) != ("1", "1"):
            continue
        pairs = int(row["num_tokens"]) * int(row["topk"])
        if pairs >= 512 * int(row["num_experts"]):
            flops = 6.0 * pairs * int(row["hidden_size"]) * int(row["inter_size"])
            found.setdefault(name, []).append(flops / (float(row["latency_ms"]) / 1e3) / peaks[name])
    return {name: _median(values) for name, values in found.items()}


def floor(file: Path) -> float:
    """Seconds of the smallest products."""
    return statistics.median(
        float(row["latency_ms"]) / 1e3
        for row in _rows(file)
        if row["gemm_dtype"] == "bfloat16" and row["m"] == "1" and int(row["n"]) * int(row["k"]) <= 4096
    )


def prefill_attention(file: Path, peaks: Mapping[str, float]) -> dict[str, float | None]:
    """Share of the peak by number format of queries and cache, where they are the same."""
    found: dict[str, list[float]] = {}
    for row in _rows(file):
        name = _NAMES.get(row["attn_dtype"], "")
        if name not in peaks or row["attn_dtype"] != row["kv_cache_dtype"]:
            continue
        batch, length, heads = (int(row[field]) for field in ("batch_size", "isl", "num_heads"))
        if length >= 4096 and batch * heads >= 32:
            flops = 2.0 * batch * length**2 * heads * _HEAD
            found.setdefault(name, []).append(flops / (float(row["latency_ms"]) / 1e3) / peaks[name])
    return {name: _median(values) for name, values in found.items()}


def decode_attention(file: Path, bandwidth: float) -> dict[str, float | None]:
    """Share of the bandwidth by number format of the cache."""
    found: dict[str, list[tuple[bool, float]]] = {}
    for row in _rows(file):
        name = _NAMES[row["kv_cache_dtype"]]
        batch, cached, heads = (int(row[field]) for field in ("batch_size", "step", "num_key_value_heads"))
        # The table writes 0 where every query head has its own.
        shared = heads not in (0, int(row["num_heads"]))
        moved = 2.0 * batch * cached * (heads or int(row["num_heads"])) * _HEAD * _BYTES[name]
        if moved > 256e6:
            share = moved / (float(row["latency_ms"]) / 1e3) / bandwidth
            found.setdefault(name, []).append((shared, share))
    result = {}
    for name, rows in found.items():
        possible = [(shared, share) for shared, share in rows if share <= 1]
        if len(possible) < 0.9 * len(rows):
            possible = [(shared, share) for shared, share in possible if not shared]
        result[name] = _median(share for _, share in possible)
    return result


def curves(nccl: Path, custom: Path) -> dict[str, list[dict[str, object]]]:
    """Times of collectives by operation, number of devices and size."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in _rows(nccl):
        if row["nccl_dtype"] == "half":
            name = "all_to_all" if row["op_name"] == "alltoall" else row["op_name"]
            _keep(found, name, row)
    for row in _rows(custom):
        if row.get("backend", "graph").endswith("graph"):
            _keep(found, "custom_all_reduce", row)
    result: dict[str, list[dict[str, object]]] = {}
    for (name, devices), points in sorted(found.items()):
        last = max(points)
        sizes = [size for i, size in enumerate(sorted(points)) if i % 2 == 0 or size == last]
        seconds = [float(f"{points[size]:.4g}") for size in sizes]
        result.setdefault(name, []).append({"devices": devices, "sizes": sizes, "seconds": seconds})
    return result


def _keep(found: dict[tuple[str, int], dict[int, float]], name: str, row: Mapping[str, str]) -> None:
    points = found.setdefault((name, int(row["num_gpus"])), {})
    points[int(row["message_size"]) * 2] = float(row["latency"]) / 1e3


def main() -> int:
    """Print the figures of one device as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the tables are")
    parser.add_argument("device", help="name that the files begin with")
    parser.add_argument("--peak", nargs="+", required=True, metavar="FORMAT=FLOPS", help="dense peaks")
    parser.add_argument("--bandwidth", type=float, required=True, help="bytes per second of the memory")
    args = parser.parse_args()
    peaks = {name: float(value) for name, value in (word.split("=") for word in args.peak)}
    base = f"{args.folder}/{args.device}_"
    figures = {
        "efficiency": {
            **products(Path(f"{base}gemm.csv.gz"), peaks, args.bandwidth),
            "prefill_attention": prefill_attention(Path(f"{base}context_attention_trtllm.csv.gz"), peaks),
            "decode_attention": decode_attention(Path(f"{base}generation_attention_trtllm.csv.gz"), args.bandwidth),
            "grouped_gemm": experts(Path(f"{base}moe.csv.gz"), peaks),
        },
        "kernel_floor": floor(Path(f"{base}gemm.csv.gz")),
        "collectives": curves(Path(f"{base}nccl.csv"), Path(f"{base}custom_allreduce.csv")),
    }
    json.dump(figures, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
