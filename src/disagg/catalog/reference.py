"""Writes the page of the catalogue: ``python -m disagg.catalog.reference [--check]``. It runs in a checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.accelerators import accelerators
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.figure_list import figures
from disagg.catalog.hf.families import FAMILIES
from disagg.catalog.models import model_entries
from disagg.catalog.params import count_parameters
from disagg.catalog.precision import Dtype
from disagg.catalog.quantity import Kind, format_quantity
from disagg.catalog.words import count_words, kind_words

PAGE = Path("docs/reference/catalogue.md")

_INTRO = """\
<!-- Made by `python -m disagg.catalog.reference` from src/disagg/catalog/data. Edit that, not this page. -->

# Catalogue

What sizing knows of models and devices, and where each figure is from. `disagg models NAME` and
`disagg accelerators NAME` show one entry in full; `--json` prints it for programs.

## Your own model

Give `--model` the path of a `config.json`, or of the folder that has it. Read are the fields of the language model
(`text_config` too), of the vision encoder, and of `quantization_config`, or `hf_quant_config.json` beside it. A
`model_type` that has no rule is read by the generic rule if it has the fields of a llama (`hidden_size`,
`num_hidden_layers`, `num_attention_heads`, `intermediate_size`, `vocab_size`) and no field that hints at parts of
another kind; the source of the model then says so. What is missing is told at once, field by field.

Rules exist for these values of `model_type`: {families}.

## Your own device

Give `--accelerator` the path of a YAML or JSON file:

```yaml
vendor: Example
sources: {{sheet: "Example data sheet, 2026"}}
peak:
  bf16: {{value: 400TFLOP/s, source: sheet}}      # dense
  fp8: 800TFLOP/s                               # a bare value is your own
memory: {{value: 64GiB, source: sheet}}
bandwidth: {{value: 2TB/s, source: sheet}}
scale_up: {{bandwidth: 100GB/s, latency: 5us, efficiency: 0.8, devices: 8}}     # per direction, inside a node
scale_out: {{bandwidth: 400Gbit/s, latency: 10us, efficiency: 0.7}}             # between nodes
host_link: 64GB/s
efficiency:
  gemm: {{bf16: 0.7, fp8: 0.55}}
watts: 700W
```

Required are a peak, `memory` and `bandwidth`. Numbers without a unit are bytes, bytes/s, FLOP/s and seconds. A bare
"gbps" is refused, as it is written for bits and for bytes. Measured collectives go under `collectives`.
`disagg accelerators h100-sxm --json` prints a complete example; `disagg calibrate-host` measures this machine's
processor and writes such a file.

Classes of kernels under `efficiency`: {kernels}.

## Origins

| Origin | Means |
|---|---|
| `measured` | timed on the machine in question |
| `catalogue` | published: a data sheet, a configuration, somebody's measurement; the source says which |
| `user` | given by you |
| `default` | a named default; the source says what it rests on |
| `derived` | computed from other figures |
"""


def make_page() -> str:
    """The text of the page."""
    families = ", ".join(f"`{name}`" for name in sorted(FAMILIES))
    kernels = ", ".join(f"`{kernel}`" for kernel in Kernel)
    lines = [_INTRO.format(families=families, kernels=kernels), *_models(), *_devices()]
    return "\n".join(lines) + "\n"


def _models() -> Iterator[str]:
    yield "## Models"
    yield ""
    yield "Parameters follow from the fields and are checked against the published number, within 2 %."
    yield ""
    yield "| Name | Repository | Parameters | per token | Built of | Context | Weights | Published | Compared with |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for entry in model_entries().values():
        model = entry.model()
        counted = count_parameters(model)
        weights = f"{model.dtype}, else {model.dense_dtype}" if model.dense_dtype else str(model.dtype)
        cells = (
            entry.name,
            f"`{entry.repository}`",
            count_words(counted.total),
            count_words(counted.active),
            kind_words(model),
            str(model.max_context),
            weights,
            entry.published,
            entry.checked,
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _devices() -> Iterator[str]:
    yield "## Accelerators"
    yield ""
    yield "Dense peaks in TFLOP/s or TOP/s; links per direction."
    yield ""
    yield "| Name | Also | 16 bit | FP8 | INT8 | 4 bit | Memory | Bandwidth | Inside a node | Between nodes | W |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for device in accelerators().values():
        peak = device.peak
        inner, outer = device.scale_up, device.scale_out
        cells = (
            device.name,
            ", ".join(device.aliases),
            _peak(peak.get(Dtype.BF16) or peak.get(Dtype.FP16)),
            _peak(peak.get(Dtype.FP8)),
            _peak(peak.get(Dtype.INT8)),
            _peak(peak.get(Dtype.NVFP4) or peak.get(Dtype.MXFP4)),
            format_quantity(device.memory.value, Kind.BYTES),
            format_quantity(device.bandwidth.value, Kind.RATE),
            "" if inner is None else f"{format_quantity(inner.bandwidth.value, Kind.RATE)}, {inner.devices} devices",
            "" if outer is None else format_quantity(outer.bandwidth.value, Kind.RATE),
            "" if device.watts is None else f"{device.watts.value:g}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _shares()
    yield "### Sources and notes"
    yield ""
    for device in accelerators().values():
        yield from _sources(device)


def _peak(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.value / 1e12:.6g}"


def _shares() -> Iterator[str]:
    formats = (Dtype.BF16, Dtype.FP16, Dtype.FP8, Dtype.INT8, Dtype.NVFP4)
    kernels = tuple(k for k in Kernel if any(pair[0] is k for d in accelerators().values() for pair in d.efficiency))
    yield "### Shares of the peaks that kernels reach"
    yield ""
    yield (
        "In each cell: " + ", ".join(f"`{dtype}`" for dtype in formats) + "; a dash where a format has no figure. "
        "In brackets: not measured on this device, taken over from others."
    )
    yield ""
    yield f"| Name | {' | '.join(str(kernel) for kernel in kernels)} |"
    yield f"|---|{'---|' * len(kernels)}"
    for device in accelerators().values():
        cells = (" ".join(_share(device.efficiency.get((kernel, dtype))) for dtype in formats) for kernel in kernels)
        yield f"| {device.name} | {' | '.join(cells)} |"
    yield ""


def _share(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    text = f"{figure.value:.2f}"
    return f"({text})" if figure.origin is Origin.DEFAULT else text


def _sources(device: Accelerator) -> Iterator[str]:
    named: dict[str, list[str]] = {}
    for item in figures(device):
        paths = named.setdefault(item.figure.source, [])
        # Shares of one class have mostly the same source: their class says enough.
        path = item.path.rpartition(".")[0] if item.path.startswith(("peak.", "efficiency.")) else item.path
        if path not in paths:
            paths.append(path)
    for name, curves in device.collectives.items():
        for curve in curves:
            paths = named.setdefault(curve.source, [])
            if name not in paths:
                paths.append(name)
    yield f"**{device.name}** ({device.vendor})"
    yield ""
    for source, paths in named.items():
        yield f"- {', '.join(f'`{path}`' for path in paths)}: {source}"
    for note in device.notes:
        yield f"- Note: {note}"
    yield ""


def main(argv: Sequence[str]) -> int:
    """Write the page, or with ``--check`` say whether it is current; 1 if it is not."""
    text = make_page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in argv:
        sys.stdout.write(f"{PAGE} is not current; run python -m disagg.catalog.reference\n")
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
