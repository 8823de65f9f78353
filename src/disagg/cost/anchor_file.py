"""Anchors as JSON. Two forms are understood; neither may have keys that are not listed.

Ours, which says all that a regime consists of; times in milliseconds, everything but `model` and steps optional::

    {
      "source": "calibration of 2026-12-01",
      "regime": {"model": "llama-3.1-8b", "accelerator": "h100-sxm", "dense": "bf16", "experts": "bf16",
                 "activations": "bf16", "kv": "bf16", "graphs": true, "step_tokens": 1},
      "shape": {"tensor": 1, "pipeline": 1, "expert": 1, "attention_data": 1, "context": 1},
      "decode": [{"sequences": 16, "context": 1024, "ms": 8.4}],
      "prefill": [{"prompts": 1, "tokens": 1024, "cached": 0, "ms": 25.2}]
    }

and that of other projectors, in which a sweep varies the batch at one input length. What its `meta` says beyond the
keys below is of no use here and is ignored::

    {
      "backend": "vllm",
      "measured": {"model": {"prefill_ms": 25.2, "decode_ms": 8.4}},
      "sweep": [{"batch": 32, "prefill_ms": 700.0, "decode_ms": 9.6}],
      "meta": {"model": "llama-3.1-8b", "tp": 1, "pp": 1, "ep": 1, "batch": 16, "input_len": 1024}
    }

A list of such objects is a file of several anchors.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from disagg.catalog.precision import Dtype
from disagg.cost.anchors import Anchor, MeasuredStep, Regime
from disagg.cost.plan import Shape
from disagg.errors import ConfigError, Problem

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ranks = Annotated[int, Field(ge=1)]
_MS = 1e-3


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Regime(_Strict):
    model: str
    accelerator: str | None = None
    dense: Dtype | None = None
    experts: Dtype | None = None
    activations: Dtype | None = None
    kv: Dtype | None = None
    graphs: bool | None = None
    step_tokens: Ranks = 1


class _Shape(_Strict):
    tensor: Ranks = 1
    pipeline: Ranks = 1
    expert: Ranks = 1
    attention_data: Ranks = 1
    context: Ranks = 1


class _Decode(_Strict):
    sequences: Positive
    context: NotNegative
    ms: Positive


class _Prefill(_Strict):
    tokens: Positive
    ms: Positive
    prompts: Positive = 1.0
    cached: NotNegative = 0.0


class _Own(_Strict):
    regime: _Regime
    source: str = ""
    shape: _Shape = _Shape()
    decode: list[_Decode] = []
    prefill: list[_Prefill] = []

    def anchor(self, where: str) -> Anchor:
        decode = [MeasuredStep(s.sequences, self.regime.step_tokens, s.context, s.ms * _MS) for s in self.decode]
        prefill = [MeasuredStep(s.prompts, s.tokens, s.cached, s.ms * _MS) for s in self.prefill]
        return Anchor(
            source=self.source or where,
            regime=Regime(**self.regime.model_dump()),
            shape=Shape(**self.shape.model_dump()),
            decode=tuple(decode),
            prefill=tuple(prefill),
        )


class _Times(_Strict):
    prefill_ms: Positive | None = None
    decode_ms: Positive | None = None


class _Measured(_Strict):
    model: _Times


class _Batch(_Times):
    batch: Positive


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    input_len: Positive
    tp: Ranks = 1
    pp: Ranks = 1
    ep: Ranks = 1
    batch: Positive = 1.0


class _Foreign(_Strict):
    meta: _Meta
    backend: str = ""
    measured: _Measured | None = None
    sweep: list[_Batch] = []

    def anchor(self, where: str) -> Anchor:
        meta, taken = self.meta, list(self.sweep)
        if self.measured is not None and all(point.batch != meta.batch for point in taken):
            taken.append(_Batch(batch=meta.batch, **self.measured.model.model_dump()))
        decode = [MeasuredStep(p.batch, 1.0, meta.input_len, p.decode_ms * _MS) for p in taken if p.decode_ms]
        prefill = [MeasuredStep(p.batch, meta.input_len, 0.0, p.prefill_ms * _MS) for p in taken if p.prefill_ms]
        return Anchor(
            source=f"{where} ({self.backend})" if self.backend else where,
            regime=Regime(model=meta.model),
            shape=Shape(tensor=meta.tp, pipeline=meta.pp, expert=meta.ep),
            decode=tuple(decode),
            prefill=tuple(prefill),
        )


def read_anchors(text: str, where: str) -> tuple[Anchor, ...]:
    """Read the anchors of a file.

    Args:
        text: Its content.
        where: Its name, for messages and as the source of what does not name one.

    Raises:
        ConfigError: If it is not JSON, a field is missing, unknown or out of range, or an anchor has no step; with
            every problem of the file.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(f"{where}:{error.lineno}", f"not JSON: {error.msg}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(where, "nested too deeply")]) from error
    listed = content if isinstance(content, list) else [content]
    anchors: list[Anchor] = []
    problems: list[Problem] = [] if listed else [Problem(where, "holds no anchor")]
    for index, each in enumerate(listed):
        place = where if len(listed) == 1 else f"{where}: anchor {index + 1}"
        try:
            read = _form(each).validate_python(each).anchor(place)
        except ValidationError as error:
            problems += [_problem(place, detail) for detail in error.errors()]
            continue
        if not read.decode and not read.prefill:
            problems.append(Problem(place, "has no measured step; give decode, prefill or both"))
        anchors.append(read)
    if problems:
        raise ConfigError(problems)
    return tuple(anchors)


def _form(content: object) -> TypeAdapter[_Own] | TypeAdapter[_Foreign]:
    """The form that an object is meant to have: only the foreign one has `meta`."""
    foreign = isinstance(content, dict) and "meta" in content
    return TypeAdapter(_Foreign) if foreign else TypeAdapter(_Own)


def _problem(place: str, detail: Any) -> Problem:
    path = ".".join(str(step) for step in detail["loc"])
    return Problem(f"{place}: {path}" if path else place, detail["msg"])
