"""Older spellings of speculative decoding settings, brought into the present one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

Config = dict[str, JsonValue]

OLD_KEYS: Mapping[str, str] = {
    "speculative_model": "model",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_model_quantization": "quantization",
    "speculative_max_model_len": "max_model_len",
}
"""Keys that vLLM has dropped, with their present names."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings in the present spelling.

    Attributes:
        config: The settings.
        renamed: Each old key that was translated, with its new name.
        conflicts: Keys that were given in both spellings with different values.
    """

    config: Config
    renamed: tuple[tuple[str, str], ...] = ()
    conflicts: tuple[str, ...] = ()


def translate(given: Mapping[str, JsonValue]) -> Translation:
    """Give old keys their new names; what has no old spelling stays as it is."""
    config: Config = {key: value for key, value in given.items() if key not in OLD_KEYS}
    renamed: list[tuple[str, str]] = []
    conflicts: list[str] = []
    for old, new in OLD_KEYS.items():
        if old not in given:
            continue
        value, key = given[old], new
        if new == "model" and value in ("ngram", "[ngram]"):
            # The old way to ask for n-gram speculation was a draft of this name.
            value, key = "ngram", "method"
        renamed.append((old, key))
        if config.setdefault(key, value) != value:
            conflicts.append(f"{old} and {key}")
        if old == "speculative_model" and key == "model":
            config.setdefault("method", "draft_model")
    return Translation(config, tuple(renamed), tuple(conflicts))
