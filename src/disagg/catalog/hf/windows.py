"""Which layers attend within a window only."""

from __future__ import annotations

from disagg.catalog.hf.fields import Fields

_FULL = {"full_attention", "attention", "full", "global_attention"}
_WINDOWED = {"sliding_attention", "local_attention", "sliding_window"}
_CHUNKED = {"chunked_attention"}
# Where the period of windowed layers is missing from the configuration, the family's code has it.
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "llama4_text": 4, "llama4": 4}


def layer_kind(fields: Fields, index: int) -> str:
    """What `layer_types` says of a layer; empty where there is no such list."""
    kinds = fields.texts("layer_types")
    return kinds[index] if index < len(kinds) else ""


def window(fields: Fields, index: int) -> int | None:
    """Tokens that a layer can look back on; None for all.

    Chunked attention, in which a token sees its own chunk only, reads as a window of the chunk's size. That is an
    upper bound: a token sees half of its chunk on average.
    """
    kind = layer_kind(fields, index)
    if kind in _FULL:
        return None
    if kind in _CHUNKED:
        return fields.integer("attention_chunk_size")
    if kind in _WINDOWED:
        return fields.integer("sliding_window", "sliding_window_size")
    if kind:
        fields.problem("layer_types", f"has {kind!r}, which is not known here for this model_type")
        return None
    return _without_list(fields, index)


def _without_list(fields: Fields, index: int) -> int | None:  # noqa: PLR0911 - one per way of saying it
    family = fields.text("model_type")
    if family in {"llama4_text", "llama4"}:
        return _chunk(fields, index)
    size = fields.maybe("sliding_window", least=1)
    if size is None:
        return None
    if fields.has("use_sliding_window") and not fields.flag("use_sliding_window"):
        return None
    pattern = fields.text("sliding_window_pattern")
    if pattern:
        return size if pattern[index % len(pattern)] == "L" else None
    if fields.has("sliding_window_pattern") or family in _PERIODS:
        period = fields.integer("sliding_window_pattern", default=_PERIODS.get(family, 1))
        # One layer of each period attends to everything, the last; where it is every layer, none is windowed.
        return size if (index + 1) % period else None
    if fields.has("use_sliding_window", "max_window_layers"):
        return size if index >= fields.integer("max_window_layers", default=0, least=0) else None
    return size


def _chunk(fields: Fields, index: int) -> int | None:
    """Llama 4: layers with rotary positions attend within chunks, every fourth attends to everything."""
    size = fields.maybe("attention_chunk_size", least=1)
    rotary = fields.integers("no_rope_layers")
    if rotary:
        return size if index < len(rotary) and rotary[index] else None
    period = fields.integer("no_rope_layer_interval", default=4)
    return size if (index + 1) % period else None
