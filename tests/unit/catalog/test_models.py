"""The models of the catalogue, and finding one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.catalog.models import ModelEntry, find_model, model_entries
from disagg.catalog.params import count_parameters
from disagg.catalog.precision import Dtype
from disagg.errors import ConfigError

ENTRIES = tuple(model_entries().values())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_has_the_published_parameters(entry: ModelEntry) -> None:
    """The parameters that follow from an entry's fields are the published ones, within 2 %: no field is wrong."""
    assert count_parameters(entry.model()).total == pytest.approx(entry.parameters, rel=0.02)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.active], ids=lambda entry: entry.name)
def test_every_mixture_has_the_published_active_parameters(entry: ModelEntry) -> None:
    """Active parameters are the published ones, within 6 % or half of the last published digit.

    Publishers count them with and without the embedding, and some without the head.
    """
    assert entry.active is not None
    model = entry.model()
    counted = count_parameters(model)
    table = counted.parts["embedding"]
    ways = [counted.active, counted.active - table, counted.active + (0 if model.tied else table)]
    digit = 0.5e9 if entry.active % 1e9 == 0 else 0.05e9
    assert min(abs(way - entry.active) for way in ways) < max(0.06 * entry.active, digit)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_name_of_an_entry_finds_it(entry: ModelEntry) -> None:
    """Short name, repository and aliases find the entry, in capitals too."""
    for name in (entry.name, entry.repository, *entry.aliases):
        assert find_model(name.upper()).name == entry.name


@pytest.mark.parametrize(
    ("asked", "name", "dtype"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b", Dtype.BF16),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-v3", Dtype.NVFP4),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b", Dtype.FP8),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", Dtype.FP8),
        ("someone/Llama_3.1 8B-AWQ", "llama-3.1-8b", Dtype.INT4),
    ],
)
def test_a_variant_is_found_by_what_it_is_built_like(asked: str, name: str, dtype: Dtype) -> None:
    """Instruct and quantised repositories find their base model; a number format in the name is taken from it."""
    model = find_model(asked)
    assert (model.name, model.dtype) == (name, dtype)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """A name that is nearly right is answered with what was probably meant, and with how to go on without."""
    with pytest.raises(ConfigError, match=r"qwen3-32b.*config\.json"):
        find_model("qwen3-33b")


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    """Any user's model works: the path of its folder, or of the file, instead of a name."""
    (tmp_path / "config.json").write_text(json.dumps(dict(model_entries()["llama-3.1-8b"].config)), encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        assert find_model(str(path)).blocks == find_model("llama-3.1-8b").blocks
