"""What the devices of a replica send each other in a step."""

from __future__ import annotations

from disagg.catalog.model import Block, MoeMlp
from disagg.cost.collectives import Collective, Exchange
from disagg.cost.load import Load
from disagg.cost.operator import ACTIVATION_BYTES
from disagg.cost.plan import Replica
from disagg.cost.work import Array


def block_traffic(block: Block, replica: Replica, load: Load) -> list[Exchange]:
    """Collectives of the layers of a block.

    Tensor parallelism sums the partial results after attention and after the feed-forward part. Where attention
    groups hold different tokens, the feed-forward part is entered by an all-gather and left by a reduce-scatter
    over the tensor-parallel ranks (dense layers, experts divided by width), or by the dispatch and combination of
    tokens between expert ranks.
    """
    exchanges: list[Exchange] = []
    shape, count = replica.shape, float(block.count)
    vector = replica.model.hidden * ACTIVATION_BYTES
    if block.attention is not None:
        if shape.attention_tensor > 1:
            size = load.tokens * vector
            exchanges.append(Exchange(Collective.ALL_REDUCE, shape.attention_tensor, count, size))
        if shape.context > 1:
            exchanges += _context_traffic(block, replica, load)
    if block.mlp is None:
        return exchanges
    if isinstance(block.mlp, MoeMlp) and shape.expert_ranks > 1 and shape.attention_groups > 1:
        return exchanges + _expert_traffic(block.mlp, replica, load, count)
    if shape.attention_data > 1:
        size = load.dense_tokens * vector
        exchanges.append(Exchange(Collective.ALL_GATHER, shape.tensor, count, size))
        exchanges.append(Exchange(Collective.REDUCE_SCATTER, shape.tensor, count, size))
    elif shape.tensor > 1:
        exchanges.append(Exchange(Collective.ALL_REDUCE, shape.tensor, count, load.dense_tokens * vector))
    return exchanges


def _expert_traffic(mlp: MoeMlp, replica: Replica, load: Load, count: float) -> list[Exchange]:
    """Each token goes to the ranks of its experts in the format of their inputs, and comes back in 16 bits.

    It goes once to each group of ranks that holds experts, however many of its experts are there: to
    N (1 - (1 - 1 / N)^k) of N groups on average; and to every rank of a group that shares them. Ranks that share
    attention hold the same tokens and send a part of them each.
    """
    shape = replica.shape
    groups = shape.expert_ranks
    copies = groups * (1.0 - (1.0 - 1.0 / groups) ** mlp.active) * shape.expert_tensor
    share = load.tokens / shape.attention_tensor * copies * replica.model.hidden
    sent = replica.precision.activations.bytes_per_element
    both = [Exchange(Collective.ALL_TO_ALL, shape.stage_devices, count, share * each) for each in (sent, 2.0)]
    if shape.attention_tensor > 1:
        vector = load.tokens * replica.model.hidden * ACTIVATION_BYTES
        both.append(Exchange(Collective.ALL_GATHER, shape.attention_tensor, count, vector))
    return both


def _context_traffic(block: Block, replica: Replica, load: Load) -> list[Exchange]:
    """Queries are gathered by the ranks that share a cache; partial results go back to their heads' owners."""
    shape, attention = replica.shape, block.attention
    heads = getattr(attention, "heads", 0)
    if not heads:
        return []
    wide = heads * shape.context / shape.attention_tensor * _query_width(block)
    size: Array = load.tokens * wide * ACTIVATION_BYTES
    return [
        Exchange(Collective.ALL_GATHER, shape.context, float(block.count), size),
        Exchange(Collective.REDUCE_SCATTER, shape.context, float(block.count), size),
    ]


def _query_width(block: Block) -> float:
    attention = block.attention
    latent = getattr(attention, "kv_rank", None)
    if latent is not None:
        return float(latent + getattr(attention, "rope_dim", 0))
    return float(getattr(attention, "head_dim", 0))


def end_traffic(replica: Replica, load: Load) -> list[Exchange]:
    """What crosses at embedding and head, and between pipeline stages."""
    model, shape = replica.model, replica.shape
    exchanges: list[Exchange] = []
    vector = model.hidden * ACTIVATION_BYTES
    if shape.tensor > 1:
        exchanges.append(Exchange(Collective.ALL_REDUCE, shape.tensor, 1.0, load.dense_tokens * vector))
        logits = load.logits * (model.vocabulary * ACTIVATION_BYTES)
        exchanges.append(Exchange(Collective.ALL_GATHER, shape.tensor, 1.0, logits))
    if shape.pipeline > 1:
        size = load.dense_tokens * (vector / shape.tensor)
        exchanges.append(Exchange(Collective.SEND, shape.devices, float(shape.pipeline - 1), size))
    return exchanges
