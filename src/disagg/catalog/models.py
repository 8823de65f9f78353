"""The models of the catalogue, and how to find one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from disagg.catalog import lookup
from disagg.catalog.hf_config import model_from_config, read_hf_config
from disagg.catalog.model import Model
from disagg.catalog.precision import Dtype

_FOLDER = Path(__file__).with_name("data") / "models"
_ADVICE = "`disagg models` lists it; any other model: give the path of its config.json, or of the folder that has it."
# What names of variants end in that are built the same.
_VARIANTS = ("-instruct-2507", "-thinking-2507", "-instruct", "-chat", "-base", "-thinking", "-it", "-pt", "-hf")
_FORMATS = {
    "-fp8": Dtype.FP8,
    "-fp8-dynamic": Dtype.FP8,
    "-nvfp4": Dtype.NVFP4,
    "-fp4": Dtype.NVFP4,
    "-mxfp4": Dtype.MXFP4,
    "-awq": Dtype.INT4,
    "-gptq-int4": Dtype.INT4,
    "-int4": Dtype.INT4,
    "-quantized.w4a16": Dtype.INT4,
    "-quantized.w8a8": Dtype.INT8,
    "-bf16": Dtype.BF16,
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the catalogue.

    Attributes:
        name: Its short name.
        repository: Where its configuration is published, on the Hugging Face hub.
        aliases: Other names that find it.
        parameters: Published number of parameters, in the precision in which it is published.
        active: Published number of parameters that one token passes; None for a dense model.
        published: Where these numbers are from, and what they count.
        checked: What the fields below were compared with.
        config: The fields of its `config.json` that matter here.
    """

    name: str
    repository: str
    aliases: tuple[str, ...]
    parameters: float
    active: float | None
    published: str
    checked: str
    config: Mapping[str, object]

    def model(self) -> Model:
        """What the configuration says."""
        return model_from_config(self.config, name=self.name, source=f"{self.repository} config.json")


@cache
def model_entries() -> Mapping[str, ModelEntry]:
    """All entries by name, sorted."""
    entries = [_read(file) for file in sorted(_FOLDER.glob("*.json"))]
    return {entry.name: entry for entry in entries}


def _read(file: Path) -> ModelEntry:
    data = json.loads(file.read_text(encoding="utf-8"))
    return ModelEntry(
        name=file.stem,
        repository=data["repository"],
        aliases=tuple(data["aliases"]),
        parameters=float(data["parameters"]),
        active=None if data["active"] is None else float(data["active"]),
        published=data["published"],
        checked=data["checked"],
        config=data["config"],
    )


@cache
def _index() -> Mapping[str, str]:
    names: dict[str, list[str]] = {}
    for name, entry in model_entries().items():
        known = [entry.repository, *entry.aliases]
        names[name] = [*known, *(n.split("/")[-1] for n in known)]
    return lookup.index(names)


def find_model(name: str) -> Model:
    """A model by name or path.

    Args:
        name: A name of the catalogue, a repository of the Hugging Face hub (variants such as -Instruct or -FP8 are
            found by their base model), or the path of a `config.json` or of its folder.

    Returns:
        The model. A number format in the name (-FP8, -NVFP4 ...) replaces the entry's.

    Raises:
        ConfigError: If there is no such name, with the nearest ones; or if the file is wrong.
    """
    path = Path(name).expanduser()
    if path.is_file() or (path.is_dir() and (path / "config.json").is_file()):
        return read_hf_config(path)
    entry, dtype = _entry(lookup.key(name))
    if entry is None:
        raise lookup.unknown("model", name, _index(), _ADVICE)
    model = model_entries()[entry].model()
    if dtype is None or dtype == model.dtype:
        return model
    note = f"number format {dtype} is taken from the name {name}"
    return replace(model, dtype=dtype, dense_dtype=None, notes=(*model.notes, note))


def _entry(name: str) -> tuple[str | None, Dtype | None]:
    """The entry of a name, and the number format that the name asks for."""
    dtype = None
    while True:
        for candidate in (name, name.rsplit("/", maxsplit=1)[-1]):
            if candidate in _index():
                return _index()[candidate], dtype
        suffix = next((s for s in (*_FORMATS, *_VARIANTS) if name.endswith(s)), None)
        if suffix is None:
            return None, None
        dtype = dtype or _FORMATS.get(suffix)
        name = name.removesuffix(suffix)
