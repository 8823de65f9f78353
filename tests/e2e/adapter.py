"""A LoRA adapter of random weights for the model that these tests use."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

_LAYERS, _HIDDEN, _VALUES, _RANK = 30, 576, 192, 4


def write_adapter(folder: Path) -> Path:
    """Write an adapter of the query and value projections, strong enough to change what the model says."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(_LAYERS):
        for name, width in (("q_proj", _HIDDEN), ("v_proj", _VALUES)):
            for part, shape in (("A", [_RANK, _HIDDEN]), ("B", [width, _RANK])):
                values = [rng.gauss(0, 0.2) for _ in range(shape[0] * shape[1])]
                begin = len(data)
                data += struct.pack(f"<{len(values)}f", *values)
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder
