"""Reading any configuration: levels, number formats, what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.catalog.hf_config import model_from_config, read_hf_config
from disagg.catalog.model import Model
from disagg.catalog.models import find_model, model_entries
from disagg.catalog.precision import Dtype
from disagg.errors import ConfigError

BASE: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def read(**fields: object) -> Model:
    return model_from_config(BASE | fields, name="m", source="config.json")


def test_the_language_part_of_a_larger_model_is_read() -> None:
    """A model of several parts has its language model in `text_config`; formats and ties may stand outside."""
    nested = {"model_type": "llava", "text_config": BASE, "tie_word_embeddings": True}
    model = model_from_config(nested, name="m", source="c")
    assert (model.blocks, model.tied) == (read().blocks, True)


def test_a_part_that_leaves_out_defaults_has_those_of_its_class() -> None:
    """google/gemma-3-4b-it as it is published: neither heads nor vocabulary, yet the same model as the full one."""
    full = find_model("gemma-3-4b")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896,
              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}  # fmt: skip
    published = {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text, "vision_config": vision}
    model = model_from_config(published, name="m", source="c")
    assert (model.blocks, model.vision, model.vocabulary) == (full.blocks, full.vision, full.vocabulary)
    assert any("num_attention_heads" in note for note in model.notes)


def test_a_file_of_one_part_has_no_defaults() -> None:
    """On the first level what is missing is a problem: such files are written with all fields."""
    with pytest.raises(ConfigError, match="hidden_size"):
        model_from_config({"model_type": "llama"}, name="m", source="c")


def test_a_head_is_tied_where_the_family_ties_it() -> None:
    """A missing `tie_word_embeddings` means what the family's code does: tied for Gemma, not for Llama."""
    assert not read().tied
    assert read(model_type="gemma2", sliding_window=256).tied
    assert not read(model_type="gemma2", sliding_window=256, tie_word_embeddings=False).tied


def weights(bits: int, kind: str) -> dict[str, object]:
    return {"group_0": {"weights": {"num_bits": bits, "type": kind}}}


@pytest.mark.parametrize(
    ("section", "dtype", "dense"),
    [
        ({"quant_method": "fp8"}, Dtype.FP8, None),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
            Dtype.FP8,
            None,
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, Dtype.MXFP4, Dtype.BF16),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.indexer"] * 4},
            Dtype.FP8,
            None,
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["l.*.self_attn.indexer.weights_proj"]}, Dtype.FP8, None),
        ({"quant_method": "awq", "bits": 4}, Dtype.INT4, None),
        ({"quant_method": "gptq", "bits": 8}, Dtype.INT8, None),
        ({"quant_method": "compressed-tensors", "config_groups": weights(8, "float")}, Dtype.FP8, None),
        ({"quant_method": "compressed-tensors", "config_groups": weights(8, "int")}, Dtype.INT8, None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": weights(4, "int"),
                "ignore": ["re:.*self_attn.*"],
            },
            Dtype.INT4,
            Dtype.BF16,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": weights(4, "float"),
                "format": "nvfp4-pack-quantized",
            },
            Dtype.NVFP4,
            None,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Dtype.NVFP4, None),
        ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, Dtype.FP8, None),
        (
            {"quant_algo": "NVFP4", "exclude_modules": [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]},
            Dtype.NVFP4,
            Dtype.BF16,
        ),
        (
            {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
            Dtype.NVFP4,
            None,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"l.0.attn.q": {"quant_algo": "FP8"}, "l.0.mlp.experts": {"quant_algo": "NVFP4"}},
            },
            Dtype.NVFP4,
            None,
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Dtype.INT4, None),
    ],
)
def test_number_formats(section: dict[str, object], dtype: Dtype, dense: Dtype | None) -> None:
    """Each method of quantisation says its format in its own way; attention that is left out stays as it was."""
    model = read(quantization_config=section)
    assert (model.dtype, model.dense_dtype) == (dtype, dense)


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "magic"},
        {"quant_method": "awq", "bits": 3},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": weights(6, "float")},
        {"quant_method": "modelopt", "quant_algo": "MYSTERY"},
    ],
)
def test_formats_that_are_not_known_are_refused(section: dict[str, object]) -> None:
    """An unknown format is refused with those that are known, rather than taken for 16 bits."""
    with pytest.raises(ConfigError, match=r"known are|names no group|are known"):
        read(quantization_config=section)


def test_a_separate_file_of_formats_is_read(tmp_path: Path) -> None:
    """ModelOpt writes `hf_quant_config.json` beside the configuration."""
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8"}}), encoding="utf-8"
    )
    assert read_hf_config(tmp_path).dtype is Dtype.FP8


def test_everything_that_is_missing_is_told_at_once() -> None:
    """Missing and wrong fields are named together, each with the file and what to supply."""
    with pytest.raises(ConfigError) as caught:
        model_from_config(
            {"model_type": "llama", "num_hidden_layers": "four", "num_attention_heads": 8, "num_key_value_heads": 3},
            name="m",
            source="here/config.json",
        )
    names = {problem.where.removeprefix("here/config.json: ") for problem in caught.value.problems}
    assert names >= {"hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "num_hidden_layers"}
    assert "num_key_value_heads" in names
    assert "give it as a whole number" in str(caught.value)


def test_an_unknown_type_with_the_usual_fields_is_read_by_the_generic_rule() -> None:
    """A new llama-like model works at once, and says that it was read by the generic rule."""
    model = read(model_type="novelty")
    assert model.blocks == read().blocks
    assert "generic rule" in model.source
    assert "novelty" in model.source


@pytest.mark.parametrize("field", ["mamba_d_state", "linear_attn_config", "compress_ratios", "block_configs"])
def test_an_unknown_type_with_parts_of_its_own_is_refused(field: str) -> None:
    """What the generic rule would overlook makes it refuse, naming the field."""
    with pytest.raises(ConfigError, match=rf"novelty.*{field}"):
        read(model_type="novelty", **{field: [1]})


def test_an_unknown_type_without_the_usual_fields_is_refused() -> None:
    """The message names the type, and the fields that the generic rule would need."""
    with pytest.raises(ConfigError, match=r"novelty.*needs hidden_size"):
        model_from_config({"model_type": "novelty"}, name="m", source="c")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    """What is not JSON, or not an object, is refused with the file's name."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**12) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted({name for entry in model_entries().values() for name in entry.config}))
ENTRIES = st.sampled_from(sorted(model_entries()))


@given(ENTRIES, st.dictionaries(NAMES, JSON, max_size=3))
def test_damaged_configurations_are_read_or_refused(name: str, damage: dict[str, object]) -> None:
    """Whatever is in a field, the answer is a model or a list of problems, never a traceback."""
    try:
        model = model_from_config(dict(model_entries()[name].config) | damage, name="m", source="c")
    except ConfigError:
        return
    assert model.layers > 0
