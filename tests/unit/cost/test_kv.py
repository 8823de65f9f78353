"""Bytes of the KV cache, by hand, for every kind of attention and spreading."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.catalog.model import LatentAttention, Model, SparseIndexer
from disagg.catalog.precision import Dtype
from disagg.cost.kv import (
    device_sequence_bytes,
    in_blocks,
    request_bytes,
    request_bytes_per_device,
    sequence_bytes,
    state_bytes,
    token_bytes,
)
from disagg.cost.plan import Precision, Replica, Shape
from tests.support.cost_examples import DEEPSEEK_V3, GEMMA_9B, HYBRID, LLAMA_8B, LLAMA_70B, OPT_13B, device, llama

GIB = 2**30
BF16 = Dtype.BF16


@pytest.mark.parametrize(
    ("model", "size"), [(LLAMA_8B, 131_072), (LLAMA_70B, 327_680), (OPT_13B, 819_200), (DEEPSEEK_V3, 70_272)]
)
def test_published_bytes_per_token(model: Model, size: int) -> None:
    """2 x layers x KV heads x width x 2 B; 61 x (512 + 64) x 2 B for latents."""
    assert float(request_bytes(model, BF16, 1.0)) == size


def test_bytes_of_a_request_are_those_of_one_request() -> None:
    """4096 tokens of Llama-3.1-8B are half a GiB: 1.25 ms at 400 GiB/s, 14.29 ms at 35, 1 GiB is 21.475 ms at
    400 Gbit/s = 50 GB/s. Queries are not sent, and a cache in 8 bits is half as large."""
    size = float(request_bytes(LLAMA_8B, BF16, 4096.0))
    assert size == GIB / 2
    assert size / (400 * GIB) * 1e3 == pytest.approx(1.25)
    assert size / (35 * GIB) * 1e3 == pytest.approx(14.29, abs=5e-3)
    assert 2 * size / (400e9 / 8) * 1e3 == pytest.approx(21.475, abs=5e-4)
    assert float(request_bytes(LLAMA_8B, Dtype.FP8, 4096.0)) == size / 2


def test_ranks_hold_their_heads_and_at_least_one() -> None:
    """8 KV heads on 4 ranks are 2 each, on 16 ranks 1 each; two stages have half of the layers each."""
    for ranks, share in ((1, 1.0), (2, 0.5), (4, 0.25), (8, 0.125), (16, 0.125)):
        found = device_sequence_bytes(Replica(LLAMA_8B, device(), Shape(ranks)), 1000.0)
        assert float(found) == 131_072 * 1000 * share
    staged = device_sequence_bytes(Replica(LLAMA_8B, device(), Shape(2, 2)), 1000.0)
    assert float(staged) == 131_072 * 1000 / 4


def test_uneven_stages_count_the_fullest() -> None:
    """10 layers on 4 stages: the fullest has 3."""
    model = llama(10, 4096, 32, 14336, "ten")
    found = device_sequence_bytes(Replica(model, device(), Shape(1, 4)), 100.0)
    assert float(found) == pytest.approx(100 * 3 * 2 * 8 * 128 * 2, rel=1e-12)


def test_latents_are_whole_on_every_rank() -> None:
    """Tensor parallelism does not divide them; ranks that share a cache do."""
    for shape, share in ((Shape(8), 1.0), (Shape(8, attention_data=8, expert=8), 1.0), (Shape(8, context=4), 0.25)):
        found = device_sequence_bytes(Replica(DEEPSEEK_V3, device(), shape), 1000.0)
        assert float(found) == 70_272 * 1000 * share


def test_sharing_a_cache_undoes_repeated_heads() -> None:
    """8 KV heads on 16 ranks: one each, twice; shared by two ranks each holds one head for half of the tokens."""
    found = device_sequence_bytes(Replica(LLAMA_8B, device(), Shape(16, context=2)), 1000.0)
    assert float(found) == 131_072 * 1000 / 16


def test_windowed_layers_hold_the_window() -> None:
    """gemma-2-9b at 8192 tokens: 21 layers hold 4096, 21 hold 8192, 2 x 8 x 256 x 2 B each."""
    row = 2 * 8 * 256 * 2
    assert float(request_bytes(GEMMA_9B, BF16, 8192.0)) == 21 * (4096 + 8192) * row
    assert float(request_bytes(GEMMA_9B, BF16, 1000.0)) == 42 * 1000 * row


def test_states_do_not_grow() -> None:
    """6 layers hold 8 x 128 x 128 elements and 3 inputs of 2 x 512 + 1024 channels in 16 bits; 2 grow per token."""
    state = (8 * 128 * 128 + 3 * (2 * 4 * 128 + 8 * 128)) * 2
    assert state_bytes(HYBRID.blocks[0].attention) == state
    grows = 2 * 2 * 2 * 128 * 2
    assert float(request_bytes(HYBRID, BF16, 500.0)) == 6 * state + 500 * grows
    half = state_bytes(HYBRID.blocks[0].attention, Shape(2))
    assert half == state / 2


def test_the_chooser_of_sparse_attention_caches_its_keys() -> None:
    """One key of 128 elements per token beside the latent."""
    sparse = LatentAttention(128, 1536, 512, 128, 64, 128, SparseIndexer(64, 128, 2048))
    assert token_bytes(sparse, BF16) == (512 + 64 + 128) * 2


def test_blocks_round_up() -> None:
    """17 tokens take two blocks of 16; without blocks they take 17."""
    assert float(in_blocks(17.0, 16)) == 32
    assert float(in_blocks(16.0, 16)) == 16
    assert float(in_blocks(17.0, 0)) == 17
    rounded = sequence_bytes(LLAMA_8B, BF16, np.asarray([1.0, 16.0, 17.0]), block=16)
    assert rounded.tolist() == [131_072 * 16, 131_072 * 16, 131_072 * 32]


def test_a_receiver_takes_what_its_ranks_hold() -> None:
    """On 4 ranks a quarter each; on 16 an eighth each, so that all together take twice what was sent once."""
    four = Replica(LLAMA_8B, device(), Shape(4), Precision())
    assert float(request_bytes_per_device(four, 4096.0)) == GIB / 2 / 4
    sixteen = Replica(LLAMA_8B, device(), Shape(16), Precision())
    assert float(request_bytes_per_device(sixteen, 4096.0)) * 16 == GIB
