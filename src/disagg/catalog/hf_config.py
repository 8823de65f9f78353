"""Reads the `config.json` of a model into what cost needs to know of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from disagg.catalog.hf.defaults import defaults_for
from disagg.catalog.hf.families import FAMILIES, Family, standard_layers
from disagg.catalog.hf.fields import Fields
from disagg.catalog.hf.latent import latent_layers
from disagg.catalog.hf.layer import Habits, blocks, hidden_size
from disagg.catalog.hf.quantization import number_formats
from disagg.catalog.hf.vision import vision_encoder
from disagg.catalog.model import Model
from disagg.errors import ConfigError, Problem

# Fields of things that the generic rule would read wrongly, because it would not see them.
_UNREAD = (
    "mamba",
    "ssm",
    "linear_",
    "lightning",
    "conv_kernel",
    "compress",
    "block_configs",
    "cross_attention_layers",
    "hybrid",
    "sparse_attention",
    "latent_size",
    "is_encoder_decoder_",
    "rwkv",
    "index_topk_",
    "kv_shared",
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def read_hf_config(path: Path, *, name: str = "") -> Model:
    """Read a model's configuration.

    Args:
        path: A `config.json`, or the folder that has it. `hf_quant_config.json` beside it is read as well.
        name: What to call the model; the path if empty.

    Returns:
        The model.

    Raises:
        ConfigError: If the file cannot be read, is of a kind that is not known, or lacks fields: all at once.
    """
    file = path / "config.json" if path.is_dir() else path
    data = dict(_load(file))
    beside = file.parent / "hf_quant_config.json"
    if "quantization_config" not in data and beside.is_file():
        data["quantization_config"] = _load(beside).get("quantization")
    return model_from_config(data, name=name or str(path), source=str(file))


def _load(file: Path) -> Mapping[str, object]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror or error}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(str(file), f"is not JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem(str(file), "must hold one JSON object, a model's configuration")])
    return data


def model_from_config(data: Mapping[str, object], *, name: str, source: str) -> Model:
    """Turn a configuration into a model.

    Args:
        data: The fields of a `config.json`.
        name: What to call the model.
        source: Where the fields are from; problems name it.

    Raises:
        ConfigError: If the kind is not known or fields are missing or wrong; names each.
    """
    fields = Fields(data, source)
    part = _language_part(fields)
    defaults = defaults_for(part.text("model_type")) if part is not fields else {}
    text = part.filled(defaults) if defaults else part
    family, note = _family(fields, text)
    layers = family.layers(text, family.habits)
    dtype, dense_dtype = number_formats(fields, text)
    model = Model(
        name=name,
        source=source + note,
        hidden=hidden_size(text),
        vocabulary=text.integer("vocab_size", "padded_vocab_size"),
        blocks=blocks(layers),
        tied=_tied(fields, text, family.habits),
        max_context=text.integer(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"
        ),
        dtype=dtype,
        dense_dtype=dense_dtype,
        vision=vision_encoder(fields, text),
        draft_layers=text.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules") or 0,
        notes=_notes(text, part.absent(defaults)),
    )
    if fields.problems:
        raise ConfigError(fields.problems)
    return model


def _language_part(fields: Fields) -> Fields:
    """The language model's own level, where a model of several parts has one."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        section = fields.section(name)
        if section is not None:
            return _language_part(section)
    return fields


def _family(fields: Fields, text: Fields) -> tuple[Family, str]:
    """How to read it, and what to add to the source."""
    kinds = [kind for kind in (text.text("model_type"), fields.text("model_type")) if kind]
    for kind in kinds:
        if kind in FAMILIES:
            return FAMILIES[kind], ""
    shown = kinds[0] if kinds else "missing"
    missing = [name for name in _NEEDED if not text.has(name)]
    unread = [name for name in text.names if any(word in name for word in _UNREAD)]
    if missing:
        text.problem(
            "model_type",
            f"is {shown}, which has no rule here, and the generic rule needs {', '.join(missing)}; "
            "supply these, or the model_type of a family that is built the same",
        )
    if unread:
        text.problem(
            "model_type",
            f"is {shown}, which has no rule here, and the generic rule does not know {', '.join(unread)}; "
            "supply the model_type of a family that is built the same",
        )
    layers = latent_layers if text.has("kv_lora_rank") else standard_layers
    return Family(layers, Habits()), f" (model_type {shown} by the generic rule)"


def _tied(fields: Fields, text: Fields, habits: Habits) -> bool:
    if text.has("tie_word_embeddings"):
        return text.flag("tie_word_embeddings")
    return fields.flag("tie_word_embeddings", default=habits.tied)


def _notes(text: Fields, assumed: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if assumed:
        notes.append(f"left out in the file, so the defaults of its class: {', '.join(assumed)}")
    if text.has("attention_chunk_size") and text.text("model_type").startswith("llama4"):
        notes.append("chunked attention is taken as a window of the chunk's size, an upper bound")
    if text.text("model_type") == "jamba":
        notes.append("Mamba-1 is taken as Mamba-2 with heads of 64 channels")
    return tuple(notes)
