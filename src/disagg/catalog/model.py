"""What a model is made of, as far as its cost depends on it.

A model is a sequence of blocks (layers of one kind), an embedding and a head, and perhaps a vision encoder.
All counts are of the whole model: nothing here is divided by a parallel shape (`cost` does that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from disagg.catalog.precision import Dtype


@dataclass(frozen=True, slots=True)
class SoftmaxAttention:
    """Multi-head attention in any of its groupings: MHA, GQA, MQA; full or in a sliding window.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads; equal to heads for MHA, 1 for MQA.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.
        window: Tokens that a token can look back on; None for all.
        bias: Whether the projections have biases.
        output_gate: Whether the output is gated by a projection as wide as the queries.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    bias: bool = False
    output_gate: bool = False


@dataclass(frozen=True, slots=True)
class SparseIndexer:
    """The part of sparse attention that chooses which tokens are attended to.

    Attributes:
        heads: Heads of the indexer.
        head_dim: Width of an index key; one key per token is cached.
        topk: Tokens that are attended to at most.
    """

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are cached as one small vector per token.

    Attributes:
        heads: Query heads.
        q_rank: Width of the compressed query; None if queries are projected directly.
        kv_rank: Width of the cached latent.
        nope_dim: Width of a head's part without positions.
        rope_dim: Width of the rotary key that all heads share; cached beside the latent.
        value_dim: Width of a value head.
        indexer: The chooser of sparse attention, if the model has one.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    indexer: SparseIndexer | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention with a state of fixed size per sequence (gated delta net, Mamba-2, lightning attention).

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values; each has a state of key_dim x value_dim.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        conv_width: Taps of the short convolution before it; 0 if there is none.
        gate: Whether the output is gated by a projection as wide as the values.
        state_bytes: Bytes per element of the state.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    gate: bool = True
    state_bytes: float = 2.0


Attention: TypeAlias = SoftmaxAttention | LatentAttention | LinearAttention


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A feed-forward layer that every token passes.

    Attributes:
        width: Inner width.
        gated: Three matrices (gate, up, down) instead of two.
    """

    width: int
    gated: bool = True


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A mixture of experts.

    Attributes:
        experts: Routed experts.
        active: Routed experts per token.
        width: Inner width of one routed expert.
        shared_width: Inner width of all shared experts together; 0 for none.
        gated: Three matrices per expert instead of two.
    """

    experts: int
    active: int
    width: int
    shared_width: int = 0
    gated: bool = True


Mlp: TypeAlias = DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class Block:
    """Equal layers.

    Attributes:
        count: How many.
        attention: What mixes tokens; None for a layer that has only a feed-forward part.
        mlp: The feed-forward part; None for a layer that has only a mixer.
    """

    count: int
    attention: Attention | None
    mlp: Mlp | None


@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """The encoder of pictures before the language model.

    Attributes:
        layers: Transformer layers.
        hidden: Their width.
        mlp_width: Inner width of their feed-forward part.
        heads: Attention heads.
        patch: Side of a patch in pixels.
        image: Side in pixels of the picture that the figures are for; any other size scales by area where the
            encoder takes any size.
        tokens_per_image: Tokens that the language model gets for a picture of that size.
        mlp_gated: Three matrices instead of two.
        window_share: Share of the layers that attend within windows only.
        projector_params: Parameters between encoder and language model.
    """

    layers: int
    hidden: int
    mlp_width: int
    heads: int
    patch: int
    image: int
    tokens_per_image: int
    mlp_gated: bool = False
    window_share: float = 0.0
    projector_params: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model.

    Attributes:
        name: Short name in the catalogue, or the path that it was read from.
        source: Where its configuration is published, or the file.
        hidden: Width of the residual stream.
        vocabulary: Rows of the embedding.
        blocks: The layers, in order of first occurrence.
        tied: Whether the head is the embedding.
        max_context: Longest sequence in tokens that it was made for.
        dtype: Number format of the published weights (of the experts, where they differ from the rest).
        dense_dtype: Number format of attention and dense weights where it differs from `dtype`.
        vision: The vision encoder, if it has one.
        draft_layers: Layers of multi-token prediction that are published with it.
        notes: Where this description is simpler than the model.
    """

    name: str
    source: str
    hidden: int
    vocabulary: int
    blocks: tuple[Block, ...]
    tied: bool
    max_context: int
    dtype: Dtype
    dense_dtype: Dtype | None = None
    vision: VisionEncoder | None = None
    draft_layers: int = 0
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(block.count for block in self.blocks)
