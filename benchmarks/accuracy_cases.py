"""Measured rows as cases: what was measured, and a deployment to predict it for, or the reason why there is none."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.accuracy_predict import Side, colocated_run, decode_step, prefill_alone, split_run
from benchmarks.accuracy_replay import Arrival, replay
from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.model import Model, MoeMlp
from disagg.catalog.models import find_model
from disagg.catalog.precision import Dtype
from disagg.cost.checks import shape_problems
from disagg.cost.host import SERIAL_HOST
from disagg.cost.plan import Habits, Precision, Replica, Shape

DATA = Path(__file__).parent / "data"
FORMATS = {"fp8": Dtype.FP8, "fp8_block": Dtype.FP8, "nvfp4": Dtype.NVFP4, "int4_wo": Dtype.INT4}
NARROW = (Dtype.NVFP4, Dtype.INT4)
HARNESS_LENGTHS = {(1024, 1024), (8192, 1024), (1024, 8192)}
SHORTEST = 0.8
"""InferenceMAX's client draws lengths evenly from 0.8 of the stated ones to all of them (RANDOM_RANGE_RATIO 0.8)."""

OF_2023 = Habits(step_overhead=SERIAL_HOST.value, graphs=False)
"""Engines before graph capture and asynchronous scheduling: the host works between steps and launches each kernel."""

Predict = Callable[[], Mapping[str, float]]


class LeftOutError(Exception):
    """A row that says nothing of the model, with the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured row: seconds by phase, and the function that predicts them."""

    source: str
    name: str
    model: str
    hardware: str
    engine: str
    mode: str
    measured: Mapping[str, float]
    predict: Predict


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row without a case."""

    source: str
    name: str
    reason: str


Read = Case | LeftOut


def rows(name: str) -> list[dict[str, str]]:
    """Lines of an extract."""
    text = gzip.decompress((DATA / name).read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def all_rows() -> Iterator[Read]:
    """Every row of every extract."""
    yield from silicon()
    yield from runs()
    yield from phases()
    yield from fits()
    yield from requests()


def number(row: Mapping[str, str], field: str) -> int:
    return int(float(row[field] or 0))


def silicon() -> Iterator[Read]:
    """Serving points of several engines, colocated and split."""
    seen: set[tuple[str, ...]] = set()
    for row in rows("silicon.csv.gz"):
        key = tuple(value for field, value in row.items() if field not in ("id", "wip"))
        try:
            if key in seen:
                raise LeftOutError("repeats another row in everything but its name")
            seen.add(key)
            yield _silicon_case(row)
        except LeftOutError as reason:
            yield LeftOut("silicon", row["id"], str(reason))


def _silicon_case(row: Mapping[str, str]) -> Case:
    split = row["mode"] == "disagg"
    if split and not (row["prefill_num_workers"] and row["decode_num_workers"]):
        raise LeftOutError("split whose numbers of workers are not published")
    if row["wip"] == "1":
        raise LeftOutError("marked as work in progress by its source")
    if not row["concurrency"]:
        raise LeftOutError("concurrency not published, and the first token waits for the other clients")
    clients, lengths = int(row["concurrency"]), (number(row, "isl"), number(row, "osl"))
    shortest = SHORTEST if lengths in HARNESS_LENGTHS else 1.0
    mean = (1.0 + shortest) / 2
    prompt, answer = (max(1.0, round(tokens * mean)) for tokens in lengths)
    if split:
        before = Side(_replica(row, "prefill_"), number(row, "prefill_num_workers"))
        after = Side(_replica(row, "decode_"), number(row, "decode_num_workers"))

        def predict() -> Mapping[str, float]:
            return split_run(clients, prompt, answer, before, after, shortest)
    else:
        side = Side(_replica(row, ""), 1)

        def predict() -> Mapping[str, float]:
            return colocated_run(clients, prompt, answer, side, shortest)

    measured = {"ttft": float(row["silicon_ttft_ms"]) / 1e3, "tpot": float(row["silicon_tpot_ms"]) / 1e3}
    if min(measured.values()) <= 0:
        raise LeftOutError("a measured time is zero or missing")
    mode = "split" if split else "colocated"
    model = find_model(row["model_path"]).name
    return Case("silicon", row["id"], model, row["system"], row["backend"], mode, measured, predict)


def _replica(row: Mapping[str, str], pool: str) -> Replica:
    model = find_model(row["model_path"])
    tensor, groups = max(number(row, f"{pool}tp_size"), 1), max(number(row, f"{pool}attention_dp_size"), 1)
    spread = any(isinstance(block.mlp, MoeMlp) for block in model.blocks)
    shared, experts = (max(number(row, f"{pool}moe_{kind}_size"), 1) for kind in ("tp", "ep"))
    root = math.isqrt(tensor * groups)
    if root * root == tensor * groups == shared * experts and experts > 1 and not pool:
        if shared == experts == root:
            tensor, groups, experts = (root, 1, root) if groups == 1 else (1, root, root)
        elif tensor == groups == root:
            raise LeftOutError("its devices are squared (a known fault of the table), TP or attention DP is not told")
    elif spread and shared * experts > 1 and shared * experts != tensor * groups:
        raise LeftOutError("experts are on another number of devices than attention")
    shape = Shape(
        tensor=tensor * groups,
        pipeline=max(number(row, f"{pool}pp_size"), 1),
        expert=experts if spread else 1,
        attention_data=groups,
    )
    if shape_problems(model, shape):
        raise LeftOutError("the shape does not divide the model")
    return Replica(model, find_accelerator(row["system"]), shape, _precision(row, model))


def _precision(row: Mapping[str, str], model: Model) -> Precision:
    """Number formats that a row names.

    A 4-bit checkpoint of a model whose own dense layers are 16 bits keeps them so. FP8 caches come with the
    quantised checkpoints that TensorRT-LLM runs (their quantisation files name the cache's format); the other
    engines keep 16 bits unless told.
    """
    device = find_accelerator(row["system"])
    dense = FORMATS.get(row["gemm_quant_mode"], Dtype.BF16)
    experts = FORMATS.get(row["moe_quant_mode"], Dtype.BF16)
    if model.dense_dtype is not None and experts in NARROW:
        dense = model.dense_dtype
    if model.dtype is Dtype.MXFP4 and experts is Dtype.NVFP4:
        experts = Dtype.MXFP4
    quantised = row["gemm_quant_mode"] in ("fp8", "fp8_block", "nvfp4")
    kv = Dtype.FP8 if row["backend"] == "trtllm" and quantised and Dtype.FP8 in device.peak else Dtype.BF16
    return Precision(dense, experts, dense if dense in device.peak else Dtype.BF16, kv)


def runs() -> Iterator[Read]:
    """Decode against context on eight H200 (according to the scripts beside the results), vLLM, medians."""
    for row in rows("inferencex.csv.gz"):
        model = find_model(row["model_id"])
        form = row["file"].split("_vllm_")[1].split("_")[0]
        lengths = row["file"].split("_isl")[1].split("_")
        prompt, clients = float(lengths[0]), number(row, "max_concurrency")
        groups, experts = (8 if form == "dep8" else 1), (8 if form.endswith("ep8") else 1)
        shape = Shape(tensor=8, expert=experts, attention_data=groups)
        if shape_problems(model, shape):
            yield LeftOut("inferencex", row["file"], "the shape does not divide the model")
            continue
        side = Side(Replica(model, find_accelerator("h200_sxm"), shape, _checkpoint(model)), 1)
        measured = {"ttft": float(row["median_ttft"]), "tpot": float(row["median_tpot"])}

        def predict(clients: int = clients, prompt: float = prompt, side: Side = side) -> Mapping[str, float]:
            return colocated_run(clients, prompt, 128.0, side)

        yield Case("inferencex", row["file"], model.name, "h200_sxm", "vllm", "colocated", measured, predict)


def _checkpoint(model: Model) -> Precision:
    dense = model.dense_dtype or model.dtype
    return Precision(dense, model.dtype, dense)


def phases() -> Iterator[Read]:
    """Prefill and decode of Llama-2-70B with a vLLM of 2023."""
    model = find_model("llama-2-70b")
    for index, row in enumerate(rows("splitwise.csv.gz")):
        name = f"row {index + 1}"
        batch, prompt, answer = (number(row, f"{kind}_size") for kind in ("batch", "prompt", "token"))
        ranks = number(row, "tensor_parallel")
        reason = ""
        if row["hardware"] == "h100-80gb-pcap":
            reason = "derived from another row, not measured"
        elif ranks == 2 and batch == 64:
            reason = "bad cell: 64 prompts faster than 32"
        elif answer > 512:
            reason = "generation ended before the stated length"
        if reason:
            yield LeftOut("splitwise", name, reason)
            continue
        device = find_accelerator({"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm"}[row["hardware"]])
        replica = Replica(model, device, Shape(tensor=ranks), habits=OF_2023)
        measured = {"prefill": float(row["prompt_time"]) / 1e3, "decode": float(row["token_time"]) / 1e3}

        def predict(
            replica: Replica = replica, many: int = batch, prompt: int = prompt, answer: int = answer
        ) -> Mapping[str, float]:
            return {
                "prefill": prefill_alone(replica, many, prompt),
                "decode": decode_step(replica, many, prompt + answer / 2),
            }

        yield Case("splitwise", name, model.name, device.name, "vllm 2023", "phases", measured, predict)


def fits() -> Iterator[Read]:
    """Published fits of prefill and decode times of OPT, at points inside what was profiled."""
    coefficients = {
        (row["engine"], row["model"], int(row["tensor"]), row["phase"]): [float(row[k]) / 1e3 for k in "abc"]
        for row in rows("distserve.csv.gz")
    }
    for (engine, name, ranks, phase), (a, b, c) in coefficients.items():
        label, model = f"{engine} {name} TP{ranks} {phase}", find_model(name)
        shape = Shape(tensor=ranks)
        if c < 0:
            yield LeftOut("distserve", label, "its fit falls with the load")
            continue
        if shape_problems(model, shape):
            yield LeftOut("distserve", label, "the shape does not divide the model")
            continue
        replica = Replica(model, find_accelerator("a100-sxm-80gb"), shape, habits=OF_2023)
        yield from _points(engine, label, replica, phase, (a, b, c))


def _points(engine: str, label: str, replica: Replica, phase: str, fit: tuple[float, float, float]) -> Iterator[Case]:
    a, b, c = fit

    def case(measured: Mapping[str, float], at: str, predict: Predict) -> Case:
        name, model = f"{label} {at}", replica.model.name
        return Case("distserve", name, model, "a100-sxm-80gb", f"{engine} 2023", "phases", measured, predict)

    if phase == "prefill":
        for tokens in (256, 1024, 2048):
            yield case(
                {"prefill": a + b * tokens + c * tokens**2},
                f"at {tokens}",
                lambda tokens=tokens: {"prefill": prefill_alone(replica, 1, tokens)},  # type: ignore[misc]
            )
        return
    for batch in (1, 16, 64) if phase == "decoding_smallbs" else (128,):
        yield case(
            {"decode": a + b * 512 * batch + c * batch},
            f"at {batch} x 512",
            lambda batch=batch: {"decode": decode_step(replica, batch, 512)},  # type: ignore[misc]
        )


def requests() -> Iterator[Read]:
    """Requests of two runs of vLLM 0.19 on RTX PRO 6000, BF16: at most 128 sequences and 2,048 tokens per step."""
    for name, ranks in (("llama-3.1-8b", 1), ("qwen3-32b", 2)):
        lines = sorted(rows(f"requests-{name}.csv.gz"), key=lambda row: float(row["queued_ts"]))
        start = float(lines[0]["queued_ts"])
        arrivals = tuple(
            Arrival(float(row["queued_ts"]) - start, number(row, "input_toks"), number(row, "output_toks"))
            for row in lines
        )
        model = find_model(name)
        replica = Replica(model, find_accelerator("rtx-pro-6000"), Shape(tensor=ranks))
        run = cache(lambda replica=replica, arrivals=arrivals: replay(replica, arrivals, 128, 2048))
        for index, row in enumerate(lines):
            queued, first, last = (float(row[f"{field}_ts"]) for field in ("queued", "first_token", "last_token"))
            if arrivals[index].answer < 2:
                yield LeftOut("requests", f"{name} {index}", "one token: no time per token")
                continue
            gaps = arrivals[index].answer - 1
            measured = {"ttft": first - queued, "tpot": (last - first) / gaps}

            def predict(
                run: Callable[[], list[tuple[float, float]]] = run,
                index: int = index,
                at: float = arrivals[index].at,
                gaps: int = gaps,
            ) -> Mapping[str, float]:
                begun, ended = run()[index]
                return {"ttft": begun - at, "tpot": (ended - begun) / gaps}

            yield Case("requests", f"{name} {index}", name, "rtx-pro-6000", "vllm 0.19", "open", measured, predict)
