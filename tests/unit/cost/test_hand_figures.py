"""Arithmetic and traffic of five kinds of models, derived by hand from their published configurations."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.catalog.model import Model
from disagg.catalog.models import find_model, model_entries
from disagg.catalog.params import count_parameters
from disagg.catalog.precision import Dtype
from disagg.cost.experts import distinct_experts, inclusion
from disagg.cost.load import load, mean_reach
from disagg.cost.operator import Operator
from disagg.cost.plan import Habits, Precision, Replica, Shape
from disagg.cost.step import price, step_operators
from disagg.cost.weights import weight_bytes
from disagg.cost.work import Work, decode_work, prompt_work
from tests.support.cost_examples import DEEPSEEK_V3, GEMMA_9B, HYBRID, LLAMA_8B, MIXTRAL, MODELS, OPT_13B, device

ALONE, BF16, PLAIN = Shape(), Precision(), Habits()
FP8 = Precision(Dtype.FP8, Dtype.FP8, Dtype.FP8, Dtype.BF16, Dtype.BF16)


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


def operators(
    model: Model,
    work: Work,
    *,
    shape: Shape = ALONE,
    precision: Precision = BF16,
    habits: Habits = PLAIN,
) -> list[Operator]:
    """Operators of one step."""
    replica = Replica(model, device(), shape, precision, habits)
    return step_operators(replica, load(work, shape))


def flops(found: list[Operator], *parts: str) -> float:
    """Arithmetic of some parts, or of all."""
    return sum(float(o.flops) for o in found if not parts or o.part in parts)


def moved(found: list[Operator], *parts: str) -> float:
    """Bytes of some parts."""
    return sum(float(o.moved) for o in found if o.part in parts)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_one_device_holds_every_parameter_of_the_catalogue(model: Model) -> None:
    """Two bytes for each parameter that the catalogue counts, part by part (it checks these against publications)."""
    held = weight_bytes(Replica(model, device()))
    counted = count_parameters(model).parts
    assert {part: size / 2 for part, size in held.items()} == pytest.approx(dict(counted))


def test_every_model_of_the_catalogue_can_be_priced() -> None:
    """Whatever its layers are: weights as counted, and a finite time for a prompt and for decoding."""
    for name in model_entries():
        replica = Replica(find_model(name), device())
        held = {part: size / 2 for part, size in weight_bytes(replica).items()}
        assert held == pytest.approx(dict(count_parameters(replica.model).parts)), name
        for work in (decode_work(a(4), a(1000)), prompt_work(a(2), a(300))):
            taken = float(price(replica, work).seconds)
            assert 0 < taken < 60, name


def test_grouped_queries_read_few_kv_heads() -> None:
    """Llama-3.1-8B, 8 sequences of 1000 tokens: 8 x 1000 x 131 072 B of cache, whatever the 32 query heads; queries
    and outputs are 8 x 32 x 256 x 2 B in each of 32 layers. Scores 32 x 8 x 4 x 4096 x 1000 FLOPs."""
    found = operators(LLAMA_8B, decode_work(a(8), a(1000)))
    cache = 8 * 1000 * (32 * 2 * 8 * 128 * 2)
    assert moved(found, "attention") == cache + 32 * 8 * 32 * 256 * 2
    assert flops(found, "attention") == 32 * 8 * 4 * 4096 * 1000


def test_grouped_queries_compute_their_projections() -> None:
    """Llama-3.1-8B per token: 2 x 32 x (4096 x 6144 + 4096 x 4096) projections, 2 x 32 x 3 x 4096 x 14 336 MLP,
    2 x 4096 x 128 256 head."""
    found = operators(LLAMA_8B, decode_work(a(3), a(10)))
    assert flops(found, "projections") == 3 * 2 * 32 * (4096 * 6144 + 4096 * 4096)
    assert flops(found, "mlp") == 3 * 2 * 32 * 3 * 4096 * 14336
    assert flops(found, "head") == 3 * 2 * 4096 * 128256


def test_full_attention_reads_every_head() -> None:
    """OPT-13B: 2 x 40 layers x 40 heads x 128 x 2 B = 819 200 B per token; MLP of two matrices."""
    found = operators(OPT_13B, decode_work(a(4), a(500)))
    assert moved(found, "attention") == 4 * 500 * 819_200 + 40 * 4 * 40 * 256 * 2
    assert flops(found, "mlp") == 4 * 2 * 40 * 2 * 5120 * 20480
    assert flops(found, "projections") == 4 * 2 * 40 * (5120 * 15360 + 5120 * 5120)


def test_latent_attention_decodes_from_latents() -> None:
    """DeepSeek-V3, 2 sequences of 3000 tokens: 61 x 576 x 2 B per token are read once for all 128 heads, which
    compute 2 x (512 + 64) + 2 x 512 FLOPs each per token."""
    found = operators(DEEPSEEK_V3, decode_work(a(2), a(3000)), precision=FP8)
    vectors = 61 * 2 * 128 * (2 * 512 + 64) * 2
    assert moved(found, "attention") == 2 * 3000 * 70_272 + vectors
    assert flops(found, "attention") == 61 * 2 * 128 * (2 * 576 + 2 * 512) * 3000


def test_latent_attention_expands_for_prompts() -> None:
    """DeepSeek-V3, 100 new tokens after 900 cached ones: scores over 192 + 128 wide heads at 900 + 50.5 tokens, and
    all 1000 latents are expanded (512 x 128 x 256 per token and layer)."""
    found = operators(DEEPSEEK_V3, prompt_work(a(1), a(100), 900), precision=FP8)
    assert flops(found, "attention") == pytest.approx(61 * 100 * 128 * 2 * (192 + 128) * 950.5, rel=1e-12)
    down, query = 7168 * (512 + 64 + 1536), 1536 * 128 * 192
    back = 128 * 128 * 7168
    per_token = 2 * 61 * (down + query + back)
    assert flops(found, "projections") == 100 * per_token + 1000 * 2 * 61 * 512 * 128 * 256


def test_latents_are_not_divided_by_tensor_parallelism() -> None:
    """8 ranks read the same latents; 8 attention groups read an eighth of the sequences each."""
    work = decode_work(a(16), a(2000))
    cache = 16 * 2000 * 70_272
    apart = operators(DEEPSEEK_V3, work, shape=Shape(8), precision=FP8)
    grouped = operators(DEEPSEEK_V3, work, shape=Shape(8, attention_data=8, expert=8), precision=FP8)
    shared = operators(DEEPSEEK_V3, work, shape=Shape(8, context=8), precision=FP8)
    assert moved(apart, "attention") == cache + 61 * 16 * 16 * 1088 * 2
    assert moved(grouped, "attention") == cache / 8 + 61 * 2 * 128 * 1088 * 2
    assert moved(shared, "attention") == cache / 8 + 61 * 16 * 128 * 1088 * 2


def test_experts_that_nobody_needs_are_not_read() -> None:
    """Mixtral: one token reads 2 of 8 experts, four read 8 (1 - 0.75^4) = 5.46875, on average."""
    one_expert = 3 * 4096 * 14336 * 2
    for tokens, reached in ((1, 2.0), (4, 5.46875)):
        found = operators(MIXTRAL, decode_work(a(tokens), a(0)))
        products = [o for o in found if o.part == "experts" and o.depth]
        rows = tokens * 2
        vectors = rows * (4096 + 2 * 14336) * 2 + rows * (14336 + 4096) * 2
        assert sum(float(o.moved) for o in products) == pytest.approx(
            32 * (reached * one_expert + vectors), rel=1e-12
        )
        assert sum(float(o.flops) for o in products) == 32 * rows * 2 * 3 * 4096 * 14336


def test_experts_are_dealt_to_ranks() -> None:
    """DeepSeek-V3 on 8 expert ranks: each computes an eighth of 64 x 8 rows and reads 256 (1 - (1 - 8/256)^64) / 8
    experts; the busiest one half more if the balance is 1.5."""
    for balance in (1.0, 1.5):
        found = operators(
            DEEPSEEK_V3,
            decode_work(a(64), a(0)),
            shape=Shape(8, attention_data=8, expert=8),
            precision=FP8,
            habits=Habits(expert_balance=balance),
        )
        products = [o for o in found if o.part == "experts" and o.depth]
        rows = 64 * 8 / 8 * balance
        reached = min(256 * (1 - (1 - 8 / 256) ** 64) / 8 * balance, 32)
        assert sum(float(o.flops) for o in products) == pytest.approx(58 * rows * 2 * 3 * 7168 * 2048, rel=1e-12)
        vectors = rows * (7168 + 2 * 2048 * 2) + rows * (2048 + 7168 * 2)
        weights = reached * 3 * 7168 * 2048
        assert sum(float(o.moved) for o in products) == pytest.approx(58 * (weights + vectors), rel=1e-12)


def test_copies_of_busy_experts_take_imbalance_off() -> None:
    """1 + (1.5 - 1) x 256 / (256 + 256) = 1.25 of the mean with as many copies as experts."""
    shape = Shape(8, attention_data=8, expert=8)
    work = decode_work(a(64), a(0))
    with_copies = Habits(expert_balance=1.5, redundant_experts=256)
    busy = flops(operators(DEEPSEEK_V3, work, shape=shape, habits=with_copies), "experts")
    even = flops(operators(DEEPSEEK_V3, work, shape=shape), "experts")
    assert busy / even == pytest.approx(1.25, rel=1e-12)


def test_skewed_routing_reaches_fewer_experts() -> None:
    """Inclusion probabilities add up to the experts per token and stay below one; popular ones crowd out others."""
    probability = inclusion(64, 6, 1.2)
    assert probability.sum() == pytest.approx(6, rel=1e-12)
    assert probability.max() <= 1.0
    assert np.all(np.diff(probability) <= 0)
    mlp = MIXTRAL.blocks[0].mlp
    assert mlp is not None
    skewed = distinct_experts(mlp, a(4), 1.0)  # type: ignore[arg-type]
    exact = 8 - sum((1 - p) ** 4 for p in inclusion(8, 2, 1.0))
    assert float(skewed) == pytest.approx(exact, rel=1e-9)
    assert float(skewed) < 5.46875


def test_a_window_bounds_what_is_looked_back_on() -> None:
    """gemma-2-9b, one prompt of 8192: half of the layers reach min(j, 4096) tokens, 3072.25 on average; decode at
    8192 reads 4096 tokens there and 8192 in the other half."""
    assert float(mean_reach(a(0), a(8192), 4096)) == (4096 * 4097 / 2 + 4096 * 4096) / 8192
    found = operators(GEMMA_9B, prompt_work(a(1), a(8192)))
    per_reach = 8192 * 4 * 16 * 256
    assert flops(found, "attention") == pytest.approx(21 * per_reach * (3072.25 + 4096.5), rel=1e-12)
    decode = operators(GEMMA_9B, decode_work(a(1), a(8192)))
    row = 2 * 8 * 256 * 2
    assert moved(decode, "attention") == 21 * (4096 + 8192) * row + 42 * 16 * 512 * 2
    whole = operators(GEMMA_9B, decode_work(a(1), a(8192)), habits=Habits(windowed_decode=False))
    assert moved(whole, "attention") == 42 * 8192 * row + 42 * 16 * 512 * 2


def test_mean_reach_is_the_mean_over_tokens() -> None:
    """Against the sum that the closed form stands for, before, across and beyond the window."""
    for before, piece, limit in ((0, 7, 3), (5, 4, 3), (2, 9, 6), (0, 5, 100), (100, 3, 4), (0, 1, 1)):
        tokens = [min(before + j, limit) for j in range(1, piece + 1)]
        assert float(mean_reach(a(before), a(piece), limit)) == pytest.approx(sum(tokens) / piece, rel=1e-12)


def test_a_linear_layer_costs_the_same_at_any_length() -> None:
    """Of the hybrid's 8 layers only 2 read more when the context grows: 2 x 2 x 2 x 128 x 2 B per token."""
    short = operators(HYBRID, decode_work(a(3), a(1000)))
    long = operators(HYBRID, decode_work(a(3), a(9000)))
    assert moved(long, "attention") - moved(short, "attention") == 3 * 8000 * 2 * (2 * 2 * 128 * 2)
    state = 6 * 8 * 128 * 128
    assert flops(short, "attention") == 3 * 6 * state + 2 * 3 * 4 * 8 * 128 * 1000


def test_only_outputs_need_logits() -> None:
    """A prompt of 2048 tokens has one row of the head, a chunk in its middle has none, speculation has k + 1."""
    head = 2 * 4096 * 128256
    assert flops(operators(LLAMA_8B, prompt_work(a(1), a(2048))), "head") == head
    assert flops(operators(LLAMA_8B, prompt_work(a(1), a(512), 512, ends=False)), "head") == 0
    assert flops(operators(LLAMA_8B, decode_work(a(5), a(10), 4.0)), "head") == 20 * head


def test_tensor_parallel_ranks_divide_or_repeat_heads() -> None:
    """16 ranks over 8 KV heads: 2 query heads each, and one KV head, which two ranks have."""
    found = operators(LLAMA_8B, decode_work(a(4), a(1000)), shape=Shape(16))
    assert moved(found, "attention") == 4 * 1000 * 32 * 2 * 128 * 2 + 32 * 4 * 2 * 256 * 2
    assert flops(found, "projections") == 4 * 2 * 32 * (4096 * (2 + 2) * 128 + 2 * 128 * 4096)


def test_weights_in_few_bits_are_read_in_few_bits() -> None:
    """MXFP4 takes 17 / 32 B per weight of the experts; activations in 8 bits are cast first."""
    fine = operators(MIXTRAL, decode_work(a(64), a(0)), precision=Precision(experts=Dtype.MXFP4))
    coarse = operators(MIXTRAL, decode_work(a(64), a(0)))
    reached = 8 * (1 - 0.75**64)
    saved = 32 * reached * 3 * 4096 * 14336 * (2 - 17 / 32)
    assert moved(coarse, "experts") - moved(fine, "experts") == pytest.approx(saved, rel=1e-9)
    cast = operators(LLAMA_8B, decode_work(a(8), a(0)), precision=FP8)
    widths = 32 * (4096 + 4096 + 4096 + 14336) + 4096
    assert moved(cast, "casts") == 8 * widths * 3
    assert moved(coarse, "casts") == 0
