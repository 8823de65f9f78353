"""Make the extracts in benchmarks/data from the published tables: only the columns that the benchmark reads.

FOLDER has the tables as published: `silicon/silicon_sample.csv`, `splitwise/perf_model.csv`,
`distserve/profiler-a100-80g.*.json`, `inferencex/token_position_decode_slo.csv`, `llmservingsim/RTXPRO6000_*`.
See benchmarks/data/README.md for where each is from.

Run: python -m benchmarks.make_accuracy_data FOLDER
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

DATA = Path(__file__).parent / "data"
SILICON = [
    "id",
    "backend",
    "model_path",
    "system",
    "mode",
    "isl",
    "osl",
    "gemm_quant_mode",
    "moe_quant_mode",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "prefill_num_workers",
    "prefill_tp_size",
    "prefill_pp_size",
    "prefill_attention_dp_size",
    "prefill_moe_tp_size",
    "prefill_moe_ep_size",
    "decode_num_workers",
    "decode_tp_size",
    "decode_pp_size",
    "decode_attention_dp_size",
    "decode_moe_tp_size",
    "decode_moe_ep_size",
    "batch_size",
    "prefill_batch_size",
    "decode_batch_size",
    "precision",
    "backend_version",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
]
RUNS = ["file", "model_id", "max_concurrency", "num_prompts", "median_ttft", "median_tpot"]
PHASES = ["hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time"]
REQUESTS = ["input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts"]


def write(name: str, columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> None:
    text = io.StringIO()
    out = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    (DATA / name).write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> int:
    folder = Path(sys.argv[1])
    silicon = []
    for row in table(folder / "silicon" / "silicon_sample.csv"):
        found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
        unfinished = "wip=true" in row["silicon_data_source"].lower()
        silicon.append({**row, "concurrency": found.group(1) if found else "", "wip": int(unfinished)})
    write("silicon.csv.gz", [*SILICON, "concurrency", "wip"], silicon)
    write("inferencex.csv.gz", RUNS, table(folder / "inferencex" / "token_position_decode_slo.csv"))
    write("splitwise.csv.gz", PHASES, table(folder / "splitwise" / "perf_model.csv"))
    fits = []
    for engine in ("distserve", "vllm"):
        profile = json.loads((folder / "distserve" / f"profiler-a100-80g.{engine}.json").read_text())
        for model, shapes in profile.items():
            for ranks, parts in shapes.items():
                for phase in ("prefill", "decoding_smallbs", "decoding_largebs"):
                    a, b, c = parts[phase]
                    fits.append(
                        {"engine": engine, "model": model, "tensor": ranks, "phase": phase, "a": a, "b": b, "c": c}
                    )
    write("distserve.csv.gz", ["engine", "model", "tensor", "phase", "a", "b", "c"], fits)
    for model in ("Llama-3.1-8B", "Qwen3-32B"):
        lines = (folder / "llmservingsim" / f"RTXPRO6000_{model}" / "requests.jsonl").read_text().splitlines()
        write(f"requests-{model.lower()}.csv.gz", REQUESTS, [json.loads(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
