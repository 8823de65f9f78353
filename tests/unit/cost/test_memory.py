"""Memory of the fullest device, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from disagg.catalog.model import Block, VisionEncoder
from disagg.catalog.precision import Dtype
from disagg.cost.memory import Budget, activation_bytes, plan_memory, pool_tokens, restore_seconds
from disagg.cost.plan import Habits, Precision, Replica, Shape
from disagg.cost.weights import weight_bytes
from disagg.errors import ConfigError
from tests.support.cost_examples import DEEPSEEK_V3, GEMMA_9B, HYBRID, LLAMA_8B, LLAMA_70B, MIXTRAL, device, figure

GIB = 2**30
FP8_SHAPE = Shape(8, attention_data=8, expert=8)
FP8 = Precision(Dtype.FP8, Dtype.FP8, Dtype.FP8, Dtype.BF16, Dtype.BF16)


def test_four_ranks_hold_a_quarter_of_a_large_llama() -> None:
    """80 x (2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28 672) / 4 and a quarter of embedding and head; all norms."""
    weights = weight_bytes(Replica(LLAMA_70B, device(), Shape(4)))
    assert weights["attention"] == 80 * (2 * 8192**2 + 2 * 8192 * 1024) / 4 * 2
    assert weights["mlp"] == 80 * 3 * 8192 * 28672 / 4 * 2
    assert weights["embedding"] == weights["head"] == 128256 * 8192 / 4 * 2
    assert weights["norms"] == (160 + 1) * 8192 * 2


def test_stages_hold_their_layers() -> None:
    """Two stages: half of the layers each, and one of embedding and head."""
    weights = weight_bytes(Replica(LLAMA_70B, device(), Shape(4, 2)))
    assert weights["mlp"] == 40 * 3 * 8192 * 28672 / 4 * 2
    assert "head" not in weights
    assert weights["embedding"] == 128256 * 8192 / 4 * 2


def test_attention_groups_repeat_attention() -> None:
    """DeepSeek-V3 with 8 attention groups: all attention on each device, 32 of 256 experts, the whole shared one."""
    weights = weight_bytes(Replica(DEEPSEEK_V3, device(), Shape(8, attention_data=8, expert=8), FP8))
    heads = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert weights["attention"] == 61 * (7168 * (512 + 64 + 1536) + heads)
    assert weights["experts"] == 58 * 32 * 3 * 7168 * 2048
    assert weights["shared_experts"] == 58 * 3 * 7168 * 2048
    assert weights["mlp"] == 3 * 3 * 7168 * 18432 / 8
    assert weights["router"] == 58 * 7168 * 256 * 2


def test_tensor_parallelism_repeats_the_way_down_to_latents() -> None:
    """8 ranks divide the heads of DeepSeek-V3, not the products down to its latents."""
    weights = weight_bytes(Replica(DEEPSEEK_V3, device(), Shape(8), FP8))
    heads = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert weights["attention"] == 61 * (7168 * (512 + 64 + 1536) + heads / 8)
    assert weights["experts"] == 58 * 256 * 3 * 7168 * 2048 / 8


def test_copies_of_experts_take_room() -> None:
    """256 experts and 32 copies on 32 ranks: 9 each."""
    habits = Habits(redundant_experts=32)
    weights = weight_bytes(Replica(DEEPSEEK_V3, device(), Shape(32, attention_data=32, expert=32), FP8, habits))
    assert weights["experts"] == 58 * 9 * 3 * 7168 * 2048


def test_a_tied_head_is_held_once_and_formats_count() -> None:
    """gemma-2-9b has no head of its own; MXFP4 experts of Mixtral take 17 / 32 B each."""
    assert "head" not in weight_bytes(Replica(GEMMA_9B, device()))
    experts = weight_bytes(Replica(MIXTRAL, device(), precision=Precision(experts=Dtype.MXFP4)))["experts"]
    assert experts == 32 * 8 * 3 * 4096 * 14336 * 17 / 32


def test_an_encoder_is_whole_on_every_device() -> None:
    """2 layers of 4 h^2 + 2 h f, patches of 3 x 14^2 to h, and the projector, in 16 bits."""
    vision = VisionEncoder(2, 64, 256, 4, 14, 224, 256, projector_params=1000)
    seeing = dataclasses.replace(LLAMA_8B, vision=vision)
    weights = weight_bytes(Replica(seeing, device(), Shape(4), FP8))
    assert weights["vision"] == (2 * (4 * 64**2 + 2 * 64 * 256) + 3 * 14**2 * 64 + 1000) * 2


def test_the_largest_batch_fills_what_is_left() -> None:
    """Llama-3.1-8B on 80 GB x 0.9: what weights and activations leave, by 4096 x 131 072 B a sequence."""
    budget = Budget()
    plan = plan_memory(Replica(LLAMA_8B, device()), 10.0, 4096.0, budget)
    left = 80e9 * 0.9 - sum(plan.weights.values()) - plan.activations
    assert float(plan.per_sequence) == GIB / 2
    assert float(plan.most_sequences) == left // (GIB / 2)
    assert float(plan.kv) == 10 * GIB / 2
    assert bool(plan.fits)
    assert float(plan.missing) == 0


def test_groups_hold_their_own_sequences() -> None:
    """9 sequences over 8 groups: the fullest holds 2; the replica holds 8 times what a device does."""
    large = dataclasses.replace(device(), memory=figure(141e9))
    replica = Replica(DEEPSEEK_V3, large, FP8_SHAPE, FP8)
    plan = plan_memory(replica, 9.0, 1000.0, Budget())
    assert float(plan.kv) == 2 * 1000 * 70_272
    assert float(plan.most_sequences) % 8 == 0
    assert float(plan.most_sequences) > 0


def test_what_does_not_fit_says_by_how_much() -> None:
    """70 billion parameters in 16 bits on one device of 80 GB: 141 GB of weights against 72 GB usable, and
    8192 x (2 x 8192 + 3 x 28 672) x 2 B = 1.6 GiB of activations."""
    plan = plan_memory(Replica(LLAMA_70B, device()), 1.0, 1000.0, Budget())
    assert not bool(plan.fits)
    assert float(plan.most_sequences) == 0
    assert float(plan.missing) == pytest.approx(float(plan.total) - 72e9)
    assert plan.verdict().startswith("does not fit: needs 133.3 GiB per device (131.4 weights, 0.3 KV cache")
    assert plan.verdict().endswith("device has 67.1 of 74.5 GiB usable")


def test_reserve_draft_and_blocks_count() -> None:
    """Each takes away room; a sequence is rounded up to blocks."""
    replica = Replica(LLAMA_8B, device())
    plain = plan_memory(replica, 1.0, 1000.0, Budget())
    tight = plan_memory(replica, 1.0, 1000.0, Budget(reserve=3e9, draft=2e9, block=512))
    assert tight.fixed - plain.fixed == 5e9
    assert float(tight.per_sequence) == 1024 * 131_072
    assert float(tight.most_sequences) < float(plain.most_sequences)


def test_host_memory_parks_caches() -> None:
    """64 GiB of host memory hold 128 caches of half a GiB, and make no device larger."""
    plan = plan_memory(Replica(LLAMA_8B, device()), 1.0, 4096.0, Budget(offload=64 * GIB))
    assert float(plan.parked) == 128
    assert float(plan.most_sequences) == float(
        plan_memory(Replica(LLAMA_8B, device()), 1.0, 4096.0, Budget()).most_sequences
    )


def test_parked_caches_come_back_over_the_host_link() -> None:
    """Half a GiB at 64 GB/s is 8.4 ms, at 900 GB/s 0.6 ms; without a figure the bandwidth is asked for."""
    replica = Replica(LLAMA_8B, device())
    plan = plan_memory(replica, 1.0, 4096.0, Budget())
    assert float(restore_seconds(plan, replica)) == pytest.approx(GIB / 2 / 64e9)
    assert float(restore_seconds(plan, replica, 900e9)) == pytest.approx(GIB / 2 / 900e9)
    unknown = dataclasses.replace(replica, accelerator=dataclasses.replace(device(), host_link=None))
    with pytest.raises(ConfigError, match="no figure for its link to host memory"):
        restore_seconds(plan, unknown)


def test_a_pool_is_counted_in_tokens() -> None:
    """What is left by 131 072 B per token, in whole blocks."""
    replica = Replica(LLAMA_8B, device())
    plan = plan_memory(replica, 0.0, 1.0, Budget())
    left = plan.usable - plan.fixed
    assert pool_tokens(replica, Budget()) == left // 131_072
    blocks = pool_tokens(replica, Budget(block=16))
    assert blocks % 16 == 0
    assert 0 <= left // 131_072 - blocks < 16


def test_activations_are_those_of_the_widest_layer() -> None:
    """Llama-3.1-8B, 1000 tokens: stream and residual of 4096 and gate, up and product of 14 336 each, 2 B; two ranks
    halve the inner part only."""
    replica = Replica(LLAMA_8B, device())
    assert activation_bytes(replica, 1000.0, 1.0) == 1000 * (2 * 4096 + 3 * 14336) * 2
    halved = activation_bytes(dataclasses.replace(replica, shape=Shape(2)), 1000.0, 1.0)
    assert halved == 1000 * (2 * 4096 + 3 * 14336 / 2) * 2


def test_activations_of_other_layers() -> None:
    """1000 tokens. DeepSeek-V3 on one device: 8 experts' inner widths and twice the stream each. The hybrid: the
    dense layer of 3 x 4096 outweighs the scan of 2 x 512 + 3 x 1024. A model of scans alone has these."""
    moe = activation_bytes(Replica(DEEPSEEK_V3, device()), 1000.0, 1.0)
    assert moe == 1000 * (2 * 7168 + 8 * (3 * 2048 + 2 * 7168)) * 2
    spread = activation_bytes(Replica(DEEPSEEK_V3, device(), FP8_SHAPE), 1000.0, 1.0)
    assert spread == moe
    assert activation_bytes(Replica(HYBRID, device()), 1000.0, 1.0) == 1000 * (2 * 1024 + 3 * 4096) * 2
    scans = dataclasses.replace(HYBRID, blocks=(Block(2, HYBRID.blocks[0].attention, None),))
    assert activation_bytes(Replica(scans, device()), 1000.0, 1.0) == 1000 * (2 * 1024 + 2 * 512 + 3 * 1024) * 2
    latents = dataclasses.replace(DEEPSEEK_V3, blocks=(Block(2, DEEPSEEK_V3.blocks[0].attention, None),))
    wide = 512 + 64 + 1536 + 128 * 2 * (128 + 64 + 128) / 8
    assert activation_bytes(Replica(latents, device(), Shape(8)), 1000.0, 1.0) == 1000 * (2 * 7168 + wide) * 2


def test_many_logits_may_be_more_than_a_layer() -> None:
    """1000 outputs of 128 256 logits in 32 bits outweigh a layer of as many tokens."""
    replica = Replica(LLAMA_8B, device())
    assert activation_bytes(replica, 1000.0, 1000.0) == 1000 * 128256 * 4 + 1000 * 4096 * 4


def test_points_are_planned_together() -> None:
    """Sequences and lengths broadcast."""
    sequences, tokens = np.asarray([1.0, 450.0]), np.asarray([[1000.0], [8000.0]])
    plan = plan_memory(Replica(LLAMA_8B, device()), sequences, tokens, Budget())
    assert plan.total.shape == (2, 2)
    assert plan.fits.tolist() == [[True, False], [True, False]]
