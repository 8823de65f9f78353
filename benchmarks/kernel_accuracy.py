"""How far the cost model's kernels are from measured ones: median and 90th percentile of the error per device.

Constants of the model's small-kernel rules come from these tables, so that this says how well a few rules describe
them, not how well the model predicts what it has not seen. Rows that are left out, and why:

- products: inner width below 512 or above 30 000, fewer than 512 columns: no model has them; 8-bit products with
  scales per block: the engines' own kernels, not the vendor's;
- attention: contexts below 64 tokens; more than 64 heads, or 16 query heads per KV head; prompts of more than 65 536
  tokens together, more than 512 decoding sequences; decode with shared heads on A100 (above the bandwidth);
- experts: less than two tokens per expert, where the tables do not say which experts were reached.

The folder has the tables as published, one subfolder per source:

- `aic`: ai-dynamo/aiconfigurator 0.12 (Apache-2.0), the fastest kernel of each shape as
  `<device>_gemm.csv.gz`, `<device>_context_attention_trtllm.csv.gz`, `<device>_generation_attention_trtllm.csv.gz`;
- `infersim/bench_data`: alibaba/InferSim (Apache-2.0);
- `vidur`: microsoft/vidur `data/profiling` (MIT), medians as `compute_<device>_<model>_mlp.csv.gz`.

Run: python -m benchmarks.kernel_accuracy FOLDER [--json]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.model import LatentAttention, SoftmaxAttention
from disagg.catalog.precision import Dtype
from disagg.cost.attention import attention_kernel
from disagg.cost.device import Device
from disagg.cost.mlp import PADDED_ROWS
from disagg.cost.operator import ACTIVATION_BYTES, Operator, product, stream
from disagg.cost.plan import Precision
from disagg.cost.roofline import estimate
from disagg.cost.work import Array

AIC_DEVICES = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
NAMES = {"a100_sxm": "a100-sxm-80gb"}
DTYPES = {"bfloat16": Dtype.BF16, "fp8": Dtype.FP8, "bf16": Dtype.BF16}
HEAD = 128


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one kind on one device: measured and modelled seconds."""

    device: str
    kernel: str
    measured: NDArray[np.float64]
    modelled: NDArray[np.float64]

    def line(self) -> dict[str, object]:
        """Count, median and 90th percentile of the absolute error, and median of the signed one."""
        error = self.modelled / self.measured - 1.0
        return {
            "device": self.device,
            "kernel": self.kernel,
            "rows": len(error),
            "median": round(float(np.median(np.abs(error))), 3),
            "p90": round(float(np.quantile(np.abs(error), 0.9)), 3),
            "bias": round(float(np.median(error)), 3),
        }


def rows(file: Path) -> Iterator[Mapping[str, str]]:
    """Lines of a CSV file, zipped or not."""
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    yield from csv.DictReader(io.StringIO(text))


def modelled(operators: list[Operator], device: Device) -> Array:
    """Seconds of operators one after another."""
    return estimate(operators, device).seconds


def columns(found: list[tuple[float, ...]]) -> tuple[NDArray[np.float64], ...]:
    """Rows as arrays, one per column."""
    return tuple(np.asarray(found, dtype=np.float64).T)


def per_row(values: list[float]) -> NDArray[np.float64]:
    """Modelled seconds of rows that are priced one by one."""
    return np.asarray(values, dtype=np.float64)


def products(folder: Path, name: str, device: Device) -> Iterator[Group]:
    """Plain matrix products."""
    found: dict[Dtype, list[tuple[float, ...]]] = {}
    for row in rows(folder / f"{name}_gemm.csv.gz"):
        many, outputs, inputs = (float(row[field]) for field in ("m", "n", "k"))
        if row["gemm_dtype"] in DTYPES and outputs >= 512 and 512 <= inputs <= 30000:
            seconds = float(row["latency_ms"]) / 1e3
            found.setdefault(DTYPES[row["gemm_dtype"]], []).append((many, outputs, inputs, seconds))
    for dtype, taken in found.items():
        m, n, k, measured = columns(taken)
        times = np.empty(len(m))
        for shape in {(a, b) for a, b in zip(k, n, strict=True)}:
            here = (k == shape[0]) & (n == shape[1])
            times[here] = modelled(product("", m[here], shape, 1.0, dtype, dtype), device)
        for label, here in (("few tokens", m <= 64), ("some", (m > 64) & (m < 512)), ("many", m >= 512)):
            yield Group(name, f"product {dtype}, {label}", measured[here], times[here])


def attention(folder: Path, name: str, device: Device) -> Iterator[Group]:
    """Prompts and decode with the head width 128; rotary embedding and cache writes are in the measured times."""
    for kind, label in (("context", "prompt attention"), ("generation", "decode attention")):
        found: dict[Dtype, list[tuple[float, ...]]] = {}
        for row in rows(folder / f"{name}_{kind}_attention_trtllm.csv.gz"):
            heads, kv_heads = float(row["num_heads"]), float(row["num_key_value_heads"])
            batch, tokens = float(row["batch_size"]), float(row["isl"]) + float(row["step"])
            same = row["attn_dtype"] == row["kv_cache_dtype"] or kind == "generation"
            fits = batch * tokens <= 65536 if kind == "context" else batch <= 512
            fits &= not (name == "a100_sxm" and kind == "generation" and kv_heads < heads)
            if same and fits and tokens >= 64 and 2 <= heads <= 64 and heads / kv_heads <= 16:
                key = DTYPES[row["kv_cache_dtype"]]
                found.setdefault(key, []).append((batch, tokens, heads, kv_heads, float(row["latency_ms"]) / 1e3))
        for dtype, taken in found.items():
            b, s, h, kv, seconds = columns(taken)
            operators = _attention(kind, dtype, (b, s), (h, kv))
            yield Group(name, f"{label} {dtype}", seconds, modelled(operators, device))


def _attention(kind: str, dtype: Dtype, sequences: tuple[Array, Array], both: tuple[Array, Array]) -> list[Operator]:
    (batch, tokens), (heads, kv_heads) = sequences, both
    precision = Precision(kv=dtype, activations=dtype)
    cache = batch * tokens * kv_heads * 2.0 * HEAD * dtype.bytes_per_element
    rotated = (heads + 2.0 * kv_heads) * HEAD * ACTIVATION_BYTES * 2.0
    if kind == "generation":
        moved = cache + batch * heads * 2.0 * HEAD * ACTIVATION_BYTES
        flops = 4.0 * batch * heads * HEAD * tokens
        kernel = attention_kernel(Kernel.DECODE_ATTENTION, precision, 1.0, flops=flops, moved=moved)
        return [stream("", batch * rotated, 1.0), kernel]
    each = 4.0 * batch * tokens * heads * HEAD
    kernel = attention_kernel(
        Kernel.PREFILL_ATTENTION,
        precision,
        1.0,
        flops=each * (tokens + 1.0) / 2.0,
        moved=cache + batch * tokens * heads * 2.0 * HEAD * ACTIVATION_BYTES,
        per_reach=each,
    )
    return [stream("", batch * tokens * rotated, 1.0), kernel]


def published(name: str, bf16: float, fp8: float, bandwidth: float, shares: tuple[float, float]) -> Accelerator:
    """A device of alibaba/InferSim's tables: peaks and bandwidth as given there, and the shares of its large
    grouped products and of its streamed weights."""

    def figure(value: float) -> Figure:
        return Figure(value, Origin.CATALOGUE, "alibaba/InferSim")

    efficiency = {(Kernel.GROUPED_GEMM, Dtype.FP8): figure(shares[0]), (Kernel.WEIGHTS, Dtype.FP8): figure(shares[1])}
    return Accelerator(
        name, (), "", {Dtype.BF16: figure(bf16), Dtype.FP8: figure(fp8)}, figure(0), figure(bandwidth), None, None,
        None, efficiency,
    )  # fmt: skip


def grouped(folder: Path) -> Iterator[Group]:
    """Experts' products of H20 and H800."""
    devices = {
        "h20": published("h20", 148e12, 296e12, 4.096e12, (0.84, 0.79)),
        "h800": published("h800", 989e12, 1979e12, 3.43e12, (0.63, 0.81)),
    }
    for name, accelerator in devices.items():
        device = Device(accelerator)
        for phase in ("prefill", "decode"):
            measured: list[float] = []
            times: list[float] = []
            for row in rows(folder / "grouped_gemm" / phase / name / "data.csv"):
                experts, tokens = float(row["num_local_experts"]), float(row["tokens_per_expert"])
                hidden, width = float(row["hidden_size"]), float(row["intermediate_size"])
                if tokens < 2:
                    continue
                for field, inputs, outputs in (("up", hidden, 2 * width), ("down", width, hidden)):
                    measured.append(float(row[f"{field}_proj_us"]) / 1e6)
                    operator = _experts(experts, tokens, inputs, outputs)
                    times.append(float(modelled([operator], device)))
            yield Group(name, f"experts fp8, {phase}", per_row(measured), per_row(times))


def _experts(experts: float, tokens: float, inputs: float, outputs: float) -> Operator:
    rows_of_all = experts * tokens
    return Operator(
        "",
        Kernel.GROUPED_GEMM,
        Kernel.WEIGHTS,
        Dtype.FP8,
        Dtype.FP8,
        1.0,
        np.asarray(2.0 * rows_of_all * inputs * outputs),
        np.asarray(experts * inputs * outputs + rows_of_all * (inputs + 2.0 * outputs)),
        wasted=experts * PADDED_ROWS * 2.0 * inputs * outputs,
        depth=inputs,
    )


def latent(folder: Path) -> Iterator[Group]:
    """Multi-head latent attention of 128 heads: decode on H20 and H800."""
    shape = LatentAttention(heads=128, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    wide = 2.0 * shape.kv_rank + shape.rope_dim
    for name, bf16, bandwidth in (("h20", 148e12, 4.096e12), ("h800", 989e12, 3.43e12)):
        device = Device(published(name, bf16, 2 * bf16, bandwidth, (0.63, 0.81)))
        measured: list[float] = []
        times: list[float] = []
        for row in rows(folder / "mla" / "decode" / name / "128-512-64.csv"):
            batch, tokens = float(row["batch_size"]), float(row["kv_len"])
            kernel = attention_kernel(
                Kernel.DECODE_ATTENTION,
                Precision(),
                1.0,
                flops=np.asarray(2.0 * batch * shape.heads * wide * tokens),
                moved=np.asarray(batch * (tokens * 576 + shape.heads * wide) * 2.0),
            )
            measured.append(float(row["latency_us"]) / 1e6)
            times.append(float(modelled([kernel], device)))
        yield Group(name, "latent decode attention bf16", per_row(measured), per_row(times))


def shared_heads(folder: Path) -> Iterator[Group]:
    """Decode attention with few KV heads on H800."""
    device = Device(published("h800", 989e12, 1979e12, 3.43e12, (0.63, 0.81)))
    measured: list[float] = []
    times: list[float] = []
    for file in sorted((folder / "mha" / "decode" / "h800").glob("*.csv")):
        heads, kv_heads, width = (int(part) for part in file.stem.split("-"))
        shape = SoftmaxAttention(heads, kv_heads, width, width)
        for row in rows(file):
            batch, tokens = float(row["batch_size"]), float(row["kv_len"])
            dtype = DTYPES[row["kv_dtype"]]
            cache = batch * tokens * shape.kv_heads * 2.0 * width * dtype.bytes_per_element
            kernel = attention_kernel(
                Kernel.DECODE_ATTENTION,
                Precision(kv=dtype),
                1.0,
                flops=np.asarray(4.0 * batch * shape.heads * width * tokens),
                moved=np.asarray(cache + batch * shape.heads * 2.0 * width * ACTIVATION_BYTES),
            )
            measured.append(float(row["latency_us"]) / 1e6)
            times.append(float(modelled([kernel], device)))
    yield Group("h800", "decode attention bf16 (InferSim)", per_row(measured), per_row(times))


def layers(folder: Path) -> Iterator[Group]:
    """Projections and feed-forward products inside an engine, by tokens and tensor-parallel ranks."""
    files = {
        "compute_a100_meta-llama_Meta-Llama-3-8B_mlp": ("a100_sxm", 4096, 14336, 32, 8),
        "compute_a100_meta-llama_Meta-Llama-3-70B_mlp": ("a100_sxm", 8192, 28672, 64, 8),
        "compute_h100_meta-llama_Llama-2-70b-hf_mlp": ("h100_sxm", 8192, 28672, 64, 8),
    }
    for file, (name, hidden, width, heads, kv_heads) in files.items():
        device = Device(find_accelerator(NAMES.get(name, name)))
        measured: list[float] = []
        times: list[float] = []
        for row in rows(folder / f"{file}.csv.gz"):
            ranks, tokens = int(row["num_tensor_parallel_workers"]), np.asarray(float(row["num_tokens"]))
            queries = (heads + 2 * max(kv_heads // ranks, 1) * ranks) * HEAD / ranks
            shapes = {
                "attn_pre_proj": (hidden, queries),
                "attn_post_proj": (heads * HEAD / ranks, hidden),
                "mlp_up_proj": (hidden, 2 * width / ranks),
                "mlp_down_proj": (width / ranks, hidden),
            }
            for field, shape in shapes.items():
                value = row[f"time_stats.{field}.median"]
                if value:
                    measured.append(float(value) / 1e3)
                    operators = product("", tokens, shape, 1.0, Dtype.BF16, Dtype.BF16)
                    times.append(float(modelled(operators, device)))
        model = file.split("_")[3]
        yield Group(name, f"products of {model} (vidur)", per_row(measured), per_row(times))


def groups(folder: Path) -> Iterator[Group]:
    """All groups of all tables."""
    for name in AIC_DEVICES:
        device = Device(find_accelerator(NAMES.get(name, name)))
        yield from products(folder / "aic", name, device)
        yield from attention(folder / "aic", name, device)
    bench = folder / "infersim" / "bench_data"
    yield from grouped(bench)
    yield from latent(bench)
    yield from shared_heads(bench)
    yield from layers(folder / "vidur")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the tables")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    lines = [group.line() for group in groups(arguments.folder)]
    if arguments.json:
        print(json.dumps(lines, indent=1))
        return 0
    print("| device | kernel | rows | median error | p90 | bias |\n|---|---|---|---|---|---|")
    for line in lines:
        shown = (f"{float(str(line[key])):.1%}" for key in ("median", "p90", "bias"))
        print(f"| {line['device']} | {line['kernel']} | {line['rows']} | {' | '.join(shown)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
