"""Number formats of published weights, from `dtype` and `quantization_config`."""

from __future__ import annotations

import re

from disagg.catalog.hf.fields import Fields
from disagg.catalog.precision import Dtype

_PLAIN = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "float32": Dtype.FP32, "half": Dtype.FP16}
_KNOWN = "fp8, fbgemm_fp8, mxfp4, awq, gptq, compressed-tensors, modelopt, bitsandbytes"
_ATTENTION = re.compile(r"attn|attention(?!_(?:layer)?norm)")
_NUMBERED = re.compile(r"layers\.(\d+)\.")


def number_formats(fields: Fields, text: Fields) -> tuple[Dtype, Dtype | None]:
    """Formats of the experts (or of all weights) and, where it differs, of attention and dense layers.

    Args:
        fields: The whole configuration.
        text: The language model's part of it, which may be the same.
    """
    name = (text.text("dtype", "torch_dtype") or fields.text("dtype", "torch_dtype", default="bfloat16")).split(".")[
        -1
    ]
    base = _PLAIN.get(name)
    if base is None:
        fields.problem("dtype", f"is {name!r}; known are {', '.join(_PLAIN)}")
        base = Dtype.BF16
    section = text.section("quantization_config") or fields.section("quantization_config")
    if section is None:
        return base, None
    quantised = _format(section)
    if quantised is None:
        return base, None
    # The format has experts only: what it does not name stays as it was.
    spared = section.text("quant_method") == "mxfp4" or _spares_attention(section, text)
    return quantised, base if spared and quantised is not base else None


def _format(section: Fields) -> Dtype | None:  # noqa: PLR0911 - one per method
    method = section.text("quant_method") or section.text("quant_algo").lower()
    match method:
        case "fp8" | "fbgemm_fp8" | "w8a8_fp8":
            # Experts may be narrower than the rest (a checkpoint in FP8 with experts in NVFP4).
            return _algorithm(section.text("moe_quant_algo")) or Dtype.FP8
        case "mxfp4":
            return Dtype.MXFP4
        case "awq" | "gptq" | "auto-round" | "awq_marlin" | "gptq_marlin":
            return _bits(section, section.integer("bits", "w_bit", default=4))
        case "bitsandbytes":
            return Dtype.INT4 if section.flag("load_in_4bit", "_load_in_4bit") else Dtype.INT8
        case "compressed-tensors":
            return _compressed(section)
        case _ if method.startswith("modelopt") or section.has("quant_algo"):
            return _modelopt(section)
    section.problem("quant_method", f"is {method!r}; known are {_KNOWN}")
    return None


def _bits(section: Fields, bits: int) -> Dtype | None:
    known = {4: Dtype.INT4, 8: Dtype.INT8}
    if bits not in known:
        section.problem("bits", f"is {bits}; known are 4 and 8")
    return known.get(bits)


def _compressed(section: Fields) -> Dtype | None:
    groups = section.section("config_groups")
    weights = None
    for name in groups.names if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = group.section("weights") if group is not None else None
        if weights is not None:
            break
    if weights is None:
        section.problem("config_groups", "names no group with `weights`; give their `num_bits` and `type`")
        return None
    bits, kind = weights.integer("num_bits"), weights.text("type", default="int")
    if kind == "int":
        return _bits(weights, bits)
    if bits == 8:
        return Dtype.FP8
    if bits == 4:
        return Dtype.MXFP4 if "mxfp4" in section.text("format") else Dtype.NVFP4
    weights.problem("num_bits", f"is {bits}; floats of 4 and 8 bits are known")
    return None


def _algorithm(name: str) -> Dtype | None:
    upper = name.upper()
    for word, dtype in (
        ("NVFP4", Dtype.NVFP4),
        ("MXFP4", Dtype.MXFP4),
        ("MXFP8", Dtype.MXFP8),
        ("W4A16", Dtype.INT4),
        ("W4A8", Dtype.INT4),
        ("INT4", Dtype.INT4),
        ("INT8", Dtype.INT8),
        ("W8A8", Dtype.INT8),
        ("FP8", Dtype.FP8),
    ):
        if word in upper:
            return dtype
    return None


def _modelopt(section: Fields) -> Dtype | None:
    name = section.text("quant_algo", default="FP8")
    if name == "MIXED_PRECISION":
        name = _of_experts(section)
    found = _algorithm(name)
    if found is None:
        section.problem("quant_algo", f"is {name!r}; known are NVFP4, MXFP4, MXFP8, FP8, W4A16, INT8")
    return found


def _of_experts(section: Fields) -> str:
    """Format of a mixed checkpoint's experts, or of the first of its feed-forward layers."""
    layers = section.section("quantized_layers")
    if layers is None:
        return section.text("moe_quant_algo")
    names = layers.names
    for part in ("experts", "mlp", ""):
        for name in names:
            if part in name:
                entry = layers.section(name)
                return entry.text("quant_algo") if entry is not None else ""
    return ""


def _spares_attention(section: Fields, text: Fields) -> bool:
    """Whether attention is left as it was: a pattern names it in every layer, or names of most layers do."""
    named: set[str] = set()
    for field in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"):
        for pattern in section.texts(field):
            if not _ATTENTION.search(pattern) or "norm" in pattern or "indexer" in pattern:
                continue
            number = _NUMBERED.search(pattern)
            if number is None:
                return True
            named.add(number[1])
    return len(named) >= max(1, text.integer("num_hidden_layers", "n_layer", default=1) // 2)
