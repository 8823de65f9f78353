"""What one layer of a model is while its configuration is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from disagg.catalog.hf.fields import Fields
from disagg.catalog.model import Attention, Block, Mlp


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: what mixes tokens, and the feed-forward part; either may be absent."""

    attention: Attention | None
    mlp: Mlp | None


@dataclass(frozen=True, slots=True)
class Habits:
    """What a family's code fixes and its configuration does not say.

    Attributes:
        gated: Whether feed-forward layers have a gate (three matrices).
        bias: Whether queries, keys and values have biases; None if the configuration says.
        tied: Whether the head is the embedding where the configuration does not say.
    """

    gated: bool = True
    bias: bool | None = None
    tied: bool = False


# Layers are read one by one; this bounds the time that a wrong number costs.
_MOST = 10_000

ReadLayers: TypeAlias = Callable[[Fields, Habits], list[Layer]]


def layer_count(fields: Fields) -> int:
    """Number of layers."""
    count = fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > _MOST:
        fields.problem("num_hidden_layers", f"is {count}; more than {_MOST} layers are a slip")
        return 1
    return count


def hidden_size(fields: Fields) -> int:
    """Width of the residual stream."""
    return fields.integer("hidden_size", "n_embd", "d_model", "model_dim")


def blocks(layers: Iterable[Layer]) -> tuple[Block, ...]:
    """Equal layers together, in order of first occurrence."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(Block(count, layer.attention, layer.mlp) for layer, count in counts.items())
