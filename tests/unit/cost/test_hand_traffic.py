"""Bytes of what surrounds the products of a layer, and of sparse attention, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from disagg.catalog.model import Block, LatentAttention, Model, SparseIndexer
from disagg.cost.load import load
from disagg.cost.plan import Replica, Shape
from disagg.cost.step import step_exchanges, step_operators
from disagg.cost.work import Work, decode_work, prompt_work
from tests.support.cost_examples import DEEPSEEK_V3, HYBRID, LLAMA_8B, MIXTRAL, device


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


def moved(model: Model, work: Work, part: str, shape: Shape | None = None) -> float:
    """Bytes of a part of a step."""
    replica = Replica(model, device(), shape or Shape())
    return sum(float(o.moved) for o in step_operators(replica, load(work, replica.shape)) if o.part == part)


def flops(model: Model, work: Work, part: str) -> float:
    """Arithmetic of a part of a step."""
    replica = Replica(model, device())
    return sum(float(o.flops) for o in step_operators(replica, load(work, replica.shape)) if o.part == part)


# DeepSeek-V3 with the chooser of V3.2 (deepseek-ai/DeepSeek-V3.2-Exp config.json): 64 heads of 128, 2048 tokens.
_SPARSE = LatentAttention(128, 1536, 512, 128, 64, 128, SparseIndexer(heads=64, head_dim=128, topk=2048))
SPARSE = dataclasses.replace(DEEPSEEK_V3, blocks=tuple(Block(b.count, _SPARSE, b.mlp) for b in DEEPSEEK_V3.blocks))


def test_norms_read_and_write_two_vectors() -> None:
    """2 x 32 norms and the last one, 4 x 4096 x 2 B per token; the last one only for tokens that need logits."""
    assert moved(LLAMA_8B, decode_work(a(5), a(10)), "norms") == 65 * 5 * 4 * 4096 * 2
    assert moved(LLAMA_8B, prompt_work(a(1), a(100)), "norms") == (64 * 100 + 1) * 4 * 4096 * 2


def test_embedding_and_sampling_move_rows() -> None:
    """A row in and out per token; two passes over 128 256 logits of 2 B per output."""
    assert moved(LLAMA_8B, decode_work(a(5), a(10)), "embedding") == 5 * 2 * 4096 * 2
    assert moved(LLAMA_8B, decode_work(a(5), a(10)), "sampling") == 5 * 2 * 128256 * 2


def test_rotation_reads_heads_and_writes_what_it_turned() -> None:
    """6144 elements of queries, keys and values per token and layer, and the queries again, 2 B each."""
    assert moved(LLAMA_8B, decode_work(a(5), a(10)), "rotary") == 32 * 5 * (6144 * 2 + 2 * 4096)
    wide = 128 * 192 + 512 + 64
    assert moved(DEEPSEEK_V3, decode_work(a(5), a(10)), "rotary") == 61 * 5 * wide * 2 * 2


def test_products_move_weights_inputs_and_outputs() -> None:
    """Llama-3.1-8B, 7 tokens: weights once; 4096 in and 28 672 out, the activation between them, 14 336 in and
    4096 out, 2 B each."""
    weights = 3 * 4096 * 14336 * 2
    vectors = 7 * 2 * (4096 + 28672 + (28672 + 14336) + 14336 + 4096)
    assert moved(LLAMA_8B, decode_work(a(7), a(10)), "mlp") == 32 * (weights + vectors)
    head = 4096 * 128256 * 2 + 7 * 2 * (4096 + 128256)
    assert moved(LLAMA_8B, decode_work(a(7), a(10)), "head") == head


def test_dense_layers_of_attention_groups_see_every_token() -> None:
    """Four groups, 8 sequences: each rank has a quarter of the feed-forward layers and all 8 tokens in them."""
    replica = Replica(LLAMA_8B, device(), Shape(4, attention_data=4))
    found = step_operators(replica, load(decode_work(a(8), a(10)), replica.shape))
    assert sum(float(o.flops) for o in found if o.part == "mlp") == 8 * 32 * 2 * 3 * 4096 * 14336 / 4
    assert sum(float(o.flops) for o in found if o.part == "projections") == 2 * 32 * 2 * 4096 * (6144 + 4096)
    assert sum(float(o.flops) for o in found if o.part == "head") == 8 * 2 * 4096 * 128256 / 4


def test_a_router_scores_every_expert() -> None:
    """Mixtral, 5 tokens: 4096 x 8 weights, inputs and scores; then 8 scores of 4 B and the vector itself."""
    product = 4096 * 8 * 2 + 5 * 2 * (4096 + 8)
    assert moved(MIXTRAL, decode_work(a(5), a(10)), "router") == 32 * (product + 5 * (8 * 4 + 4096 * 2))


def test_copies_of_a_token_are_put_together_again() -> None:
    """Mixtral, 4 tokens: besides products, the activation of 8 rows and 2 + 1 vectors per token."""
    reached = 8 * (1 - 0.75**4)
    weights = reached * 3 * 4096 * 14336 * 2
    products = 8 * 2 * (4096 + 28672 + 14336 + 4096)
    around = 8 * 2 * (28672 + 14336) + 4 * 3 * 4096 * 2
    found = moved(MIXTRAL, decode_work(a(4), a(10)), "experts")
    assert found == pytest.approx(32 * (weights + products + around), rel=1e-12)


def test_prompts_of_latent_attention_read_latents_and_heads() -> None:
    """100 tokens after 900: 1000 latents of 576 x 2 B, and 128 x (192 + 128) elements per token, in 61 layers."""
    found = moved(DEEPSEEK_V3, prompt_work(a(1), a(100), 900), "attention")
    assert found == 61 * (1000 * 576 * 2 + 100 * 128 * 320 * 2)


def test_a_chooser_scores_all_tokens_and_attention_sees_few() -> None:
    """5 sequences of 9000 tokens: all keys of 128 x 2 B are read and scored by 64 heads, 2048 latents attended to."""
    work = decode_work(a(5), a(9000))
    scored = 2 * 64 * 128 * 9000
    attended = 128 * 2 * (2 * 512 + 64) * 2048
    assert flops(SPARSE, work, "attention") == 61 * 5 * (scored + attended)
    vectors = 128 * (2 * 512 + 64) * 2
    assert moved(SPARSE, work, "attention") == 61 * 5 * (9000 * 128 * 2 + 2048 * 576 * 2 + vectors)
    down = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert flops(SPARSE, work, "indexer") == 61 * 5 * 2 * down


def test_a_chooser_of_prompts_looks_at_the_whole_past() -> None:
    """1000 tokens after 5000: 5500.5 tokens scored each, 2048 attended to; scores and keys are read for both."""
    work = prompt_work(a(1), a(1000), 5000)
    scored = 2 * 64 * 128 * 5500.5
    attended = 2 * 128 * 320 * 2048
    assert flops(SPARSE, work, "attention") == pytest.approx(61 * 1000 * (scored + attended), rel=1e-12)
    read = 6000 * (128 + 576) * 2 + 1000 * 128 * 320 * 2
    assert moved(SPARSE, work, "attention") == 61 * read


def test_a_scan_reads_states_and_vectors() -> None:
    """The hybrid, 3 sequences without context: 6 states of 8 x 128 x 128 x 2 B in and out, vectors of 2 x 512 +
    2 x 1024, and the short convolution over 2 x 512 + 1024 channels in and out; 2 layers of softmax attention."""
    state = 3 * 2 * 8 * 128 * 128 * 2
    vectors, conv = 3 * (2 * 512 + 2 * 1024) * 2, 3 * (2 * 512 + 1024) * 2 * 2
    softmax = 2 * 3 * 8 * 256 * 2
    assert moved(HYBRID, decode_work(a(3), a(0)), "attention") == 6 * (state + vectors + conv) + softmax
    wide = 2 * 512 + 2 * 1024 + 2 * 8
    linear = 6 * 2 * 3 * (1024 * wide + 1024 * 1024)
    full = 2 * 2 * 3 * (1024 * (8 + 2 * 2) * 128 + 1024 * 1024)
    assert flops(HYBRID, decode_work(a(3), a(0)), "projections") == linear + full


def test_a_scan_of_prompts_works_in_chunks() -> None:
    """128 tokens: 8 x (128 + 128) x 64 FLOPs more than in decode; states pass memory 3 times in each direction."""
    prompt, decode = prompt_work(a(1), a(128)), decode_work(a(128), a(64.5))
    inside = 6 * 128 * 8 * 256 * 64
    assert flops(HYBRID, prompt, "attention") - flops(HYBRID, decode, "attention") == pytest.approx(inside)
    state = 8 * 128 * 128 * 2
    read = 6 * 2 * (128 / 64 + 1) * state
    vectors = 6 * 128 * ((2 * 512 + 2 * 1024) * 2 + (2 * 512 + 1024) * 4)
    softmax = 2 * (128 * 2 * 256 * 2 + 128 * 8 * 256 * 2)
    assert moved(HYBRID, prompt, "attention") == read + vectors + softmax


def test_ranks_that_share_attention_share_its_tokens_dispatch() -> None:
    """4 attention groups of 2 ranks on 8 expert ranks, 8 sequences: a rank sends half of its group's 2 tokens, and
    the halves are gathered afterwards."""
    replica = Replica(DEEPSEEK_V3, device(), Shape(8, attention_data=4, expert=8))
    found = step_exchanges(replica, load(decode_work(a(8), a(100)), replica.shape))
    sent = sum(float(e.size) * e.calls for e in found if e.kind == "all_to_all")
    copies = 8 * (1 - (7 / 8) ** 8)
    assert sent == pytest.approx(58 * (2 / 2) * copies * 7168 * (2 + 2))
    gathered = [float(e.size) for e in found if e.kind == "all_gather" and e.ranks == 2]
    assert gathered == [2 * 7168 * 2]


def test_ranks_that_share_an_expert_all_receive_its_tokens() -> None:
    """8 attention groups on 4 groups of 2 expert ranks: each token goes to 4 (1 - (3/4)^8) groups, twice each."""
    replica = Replica(DEEPSEEK_V3, device(), Shape(8, attention_data=8, expert=4))
    found = step_exchanges(replica, load(decode_work(a(8), a(100)), replica.shape))
    sent = next(e for e in found if e.kind == "all_to_all")
    assert sent.ranks == 8
    assert float(sent.size) == pytest.approx(2 * 4 * (1 - 0.75**8) * 7168 * 2)
