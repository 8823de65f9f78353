"""What surrounds the kernels of a step: pipelines, launches, hosts, mixed steps, figures and their stand-ins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.precision import Dtype
from disagg.cost.decode import decode
from disagg.cost.device import DEFAULT_EFFICIENCY, DEFAULT_KERNEL_FLOOR, Device
from disagg.cost.host import DEFAULT_LAUNCH, DEFAULT_STEP_OVERHEAD, SERIAL_HOST
from disagg.cost.operator import product
from disagg.cost.plan import Habits, Precision, Replica, Shape
from disagg.cost.prefill import prefill
from disagg.cost.roofline import SUMMING, estimate
from disagg.cost.step import StepModel, price
from disagg.cost.work import Work, decode_work, prompt_work
from tests.support.cost_examples import LLAMA_8B, LLAMA_70B, MIXTRAL, device, figure, ideal


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


def seconds(replica: Replica, work: Work) -> float:
    """Seconds of one point."""
    return float(price(replica, work).seconds)


def quiet(accelerator: Accelerator) -> Accelerator:
    """The device without host time."""
    return dataclasses.replace(accelerator, step_overhead=figure(0.0))


def test_stages_of_decode_share_the_sequences() -> None:
    """Four stages pass four micro-batches: a step of 32 sequences takes what one of 8 takes, and three sends."""
    staged = price(Replica(LLAMA_70B, quiet(device()), Shape(4, 4)), decode_work(a(32), a(1000)))
    flat = price(Replica(LLAMA_70B, quiet(device()), Shape(4)), decode_work(a(8), a(1000)))
    assert float(staged.seconds - staged.parts["point_to_point"]) == pytest.approx(float(flat.seconds))
    assert float(staged.parts["point_to_point"]) > 3 * 2e-6


def test_stages_of_prefill_follow_each_other() -> None:
    """m prompts through s stages take (m + s - 1) / s times one prompt through all of them."""
    replica = Replica(LLAMA_70B, quiet(device()), Shape(4, 4))
    one = seconds(replica, prompt_work(a(1), a(1000)))
    assert seconds(replica, prompt_work(a(5), a(1000))) == pytest.approx(one * (5 + 3) / 4)


def test_the_busiest_attention_group_counts() -> None:
    """9 sequences on 8 groups are attended to as slowly as 16, and twice as slowly as 8."""
    replica = Replica(MIXTRAL, ideal(), Shape(8, attention_data=8, expert=8))
    eight, nine, sixteen = (
        float(price(replica, decode_work(a(n), a(20000))).parts["attention"]) for n in (8.0, 9.0, 16.0)
    )
    assert nine == pytest.approx(sixteen)
    assert nine == pytest.approx(2 * eight, rel=1e-6)


def test_hosts_are_a_part_of_their_own() -> None:
    """What the user gives counts before the device's figure, and that before the default; each is exact."""
    work = decode_work(a(1), a(10))
    plain = Replica(LLAMA_8B, device())
    assert float(price(plain, work).parts["host"]) == DEFAULT_STEP_OVERHEAD.value
    figured = dataclasses.replace(plain, accelerator=dataclasses.replace(device(), step_overhead=figure(7e-4)))
    assert float(price(figured, work).parts["host"]) == 7e-4
    given = dataclasses.replace(figured, habits=Habits(step_overhead=SERIAL_HOST.value))
    assert seconds(given, work) - seconds(plain, work) == pytest.approx(
        SERIAL_HOST.value - DEFAULT_STEP_OVERHEAD.value
    )


def test_launches_bound_a_step_without_graphs() -> None:
    """(32 x 12 + 6) launches of 20 us are 7.8 ms: a small step takes that, a large one hides it."""
    habits = Habits(graphs=False, launch=20e-6, step_overhead=0.0)
    replica = Replica(LLAMA_8B, device(), habits=habits)
    assert seconds(replica, decode_work(a(1), a(10))) == pytest.approx(390 * 20e-6)
    large = price(replica, prompt_work(a(1), a(8000)))
    assert float(large.parts["launch"]) == 0
    captured = dataclasses.replace(replica, habits=dataclasses.replace(habits, graphs=True))
    assert "launch" not in price(captured, decode_work(a(1), a(10))).parts
    unknown = dataclasses.replace(replica, habits=dataclasses.replace(habits, launch=None))
    assert any("launch of a kernel" in note for note in price(unknown, decode_work(a(1), a(10))).notes)
    assert DEFAULT_LAUNCH.value == 3e-6


def test_mixed_steps_pay_their_penalty() -> None:
    """15 % of everything but the host, only where prompts and sequences meet."""
    plain = Replica(LLAMA_8B, device())
    dear = dataclasses.replace(plain, habits=Habits(mixed_penalty=0.15))
    mixed = dataclasses.replace(prompt_work(a(1), a(500)), sequences=a(8), context=a(1000))
    extra = seconds(dear, mixed) - seconds(plain, mixed)
    assert extra == pytest.approx(0.15 * (seconds(plain, mixed) - DEFAULT_STEP_OVERHEAD.value))
    for work in (prompt_work(a(1), a(500)), decode_work(a(8), a(1000))):
        assert seconds(dear, work) == seconds(plain, work)


def test_a_mixed_step_is_cheaper_than_its_halves() -> None:
    """Weights are read once for prompts and sequences together."""
    replica = Replica(LLAMA_8B, device())
    mixed = dataclasses.replace(prompt_work(a(1), a(256)), sequences=a(8), context=a(1000))
    apart = seconds(replica, prompt_work(a(1), a(256))) + seconds(replica, decode_work(a(8), a(1000)))
    assert seconds(replica, mixed) < apart


def test_overlap_hides_communication_up_to_its_ceiling() -> None:
    """A ceiling of 0.6 leaves 40 % of it exposed in a large prompt, where there is enough arithmetic."""
    plain = Replica(LLAMA_70B, device(), Shape(4))
    hiding = dataclasses.replace(plain, habits=Habits(prefill_overlap=0.6))
    work = prompt_work(a(1), a(4000))
    whole, rest = (float(price(replica, work).parts["all_reduce"]) for replica in (plain, hiding))
    assert rest == pytest.approx(0.4 * whole)
    decoding = decode_work(a(4), a(100))
    assert seconds(hiding, decoding) == seconds(plain, decoding)


def test_a_prompt_in_chunks_is_the_sum_of_its_steps() -> None:
    """2500 tokens in chunks of 1000: two that give no token, and 500 that do."""
    model = StepModel(Replica(LLAMA_8B, device()))
    pieces = ((1000.0, 0.0, False), (1000.0, 1000.0, False), (500.0, 2000.0, True))
    expected = sum(
        float(model.price(prompt_work(a(2), a(new), before, ends=ends)).seconds) for new, before, ends in pieces
    )
    assert float(prefill(model, a(2), a(2500), chunk=1000).seconds) == pytest.approx(expected)
    grid = prefill(model, a(2), np.asarray([2500.0, 300.0]), chunk=1000)
    assert grid.seconds.shape == (2,)
    assert float(grid.seconds[1]) == pytest.approx(float(model.price(prompt_work(a(2), a(300))).seconds))


def test_a_cached_prefix_is_looked_back_on() -> None:
    """Dearer than the rest alone, cheaper than the whole prompt."""
    model = StepModel(Replica(LLAMA_8B, device()))
    rest, cached, whole = (
        float(prefill(model, a(1), a(new), before).seconds)
        for new, before in ((1000.0, 0.0), (1000.0, 15000.0), (16000.0, 0.0))
    )
    assert rest < cached < whole


def test_decode_is_the_mean_over_an_answer() -> None:
    """Eight contexts from 1000 to 1000 + 700; the time is linear in between, so the mean is that of the middle."""
    model = StepModel(Replica(LLAMA_8B, ideal()))
    mean = decode(model, a(16), a(1000), a(700))
    middle = model.price(decode_work(a(16), a(1350)))
    assert float(mean.seconds) == pytest.approx(float(middle.seconds), rel=1e-6)
    assert sum(float(part) for part in mean.parts.values()) == pytest.approx(float(mean.seconds))


def test_a_product_moves_smoothly_from_streaming_to_computing() -> None:
    """8192 x 8192 in BF16 on a perfect device: one row takes the weights' 40.07 us, 8192 rows the arithmetic's
    1111.7 us, where both are equal it is 2^(1/4) of each, and more rows never take less."""
    perfect = Device(ideal())
    rows = np.asarray([1.0, 8192.0])
    few, many = estimate(product("", rows, (8192.0, 8192.0), 1.0, Dtype.BF16, Dtype.BF16), perfect).seconds * 1e6
    assert few == pytest.approx(8192 * 8192 * 2 / 3.35e6, rel=1e-3)
    assert many == pytest.approx(2 * 8192**3 / 989e6, rel=1e-3)
    sweep = np.arange(1.0, 4096.0, dtype=np.float64)
    times = estimate(product("", sweep, (8192.0, 8192.0), 1.0, Dtype.BF16, Dtype.BF16), perfect)
    assert np.all(np.diff(times.seconds) >= 0)
    floor = np.maximum(times.flops / 989e12, times.moved / 3.35e12)
    assert np.max(times.seconds / floor) == pytest.approx(2**0.25, rel=1e-3)


def test_small_kernels_take_their_least() -> None:
    """A product of 64 x 64 takes 1.3 + 64 x 0.12 / 1000 smallest products."""
    slow = Device(dataclasses.replace(device(), kernel_floor=figure(1e-3)))
    tiny = estimate(product("", a(1), (64.0, 64.0), 1.0, Dtype.BF16, Dtype.BF16), slow)
    assert float(tiny.seconds) == pytest.approx((1.3 + 64 * SUMMING) * 1e-3, rel=1e-4)


def test_formats_that_a_device_lacks_are_computed_in_wider_ones() -> None:
    """FP8 weights on a device with only BF16 arithmetic: BF16's peak, and a note."""
    old = Device(dataclasses.replace(device(), peak={Dtype.BF16: figure(312e12)}))
    assert old.rate(Kernel.GEMM, Dtype.FP8, Dtype.FP8) == pytest.approx(312e12 * 0.75)
    assert "h100-sxm computes fp8 as bf16" in old.notes
    new = Device(device())
    assert new.rate(Kernel.GEMM, Dtype.FP8, Dtype.FP8) == pytest.approx(1978e12 * 0.55)


def test_the_wider_operand_sets_the_peak() -> None:
    """FP8 weights with BF16 inputs compute at BF16's peak, and stream at FP8's share."""
    mixed = Device(device())
    assert mixed.rate(Kernel.GEMM, Dtype.FP8, Dtype.BF16) == pytest.approx(989e12 * 0.75)
    assert mixed.stream(Kernel.WEIGHTS, Dtype.FP8) == pytest.approx(3.35e12 * 0.67)


def test_shares_that_nobody_measured_are_named_defaults() -> None:
    """A device without efficiencies uses documented ones, which a report can show."""
    bare = price(Replica(LLAMA_8B, device(efficiency={})), decode_work(a(1), a(10)))
    for kernel in (Kernel.GEMM, Kernel.WEIGHTS, Kernel.DECODE_ATTENTION, Kernel.ELEMENTWISE):
        assert f"{kernel}: {DEFAULT_EFFICIENCY[kernel]}" in bare.notes
    measured = price(Replica(LLAMA_8B, device()), decode_work(a(1), a(10)))
    assert any(note.startswith("gemm bf16: 0.75") for note in measured.notes)


def test_related_formats_lend_their_share() -> None:
    """MXFP4 weights stream like FP8's where nobody measured them, not like BF16's."""
    lending = Device(device())
    assert lending.stream(Kernel.WEIGHTS, Dtype.MXFP4) == pytest.approx(3.35e12 * 0.67)


def test_casts_are_kernels_unless_they_are_fused() -> None:
    """Fused ones move 3 B per input; as kernels of their own each takes 0.8 of the smallest product besides: four per
    layer and one for the head."""
    precision = Precision(Dtype.FP8, Dtype.FP8, Dtype.FP8)
    fused = Replica(LLAMA_8B, device(), precision=precision)
    apart = dataclasses.replace(fused, habits=Habits(fused_casts=False))
    work = decode_work(a(1), a(10))
    first, second = (float(price(replica, work).parts["casts"]) for replica in (fused, apart))
    assert first == pytest.approx((32 * (3 * 4096 + 14336) + 4096) * 3 / (3.35e12 * 0.57))
    assert second - first == pytest.approx((4 * 32 + 1) * 0.8 * DEFAULT_KERNEL_FLOOR.value)


def test_narrower_formats_make_decode_faster() -> None:
    """FP8 weights halve what is streamed, an FP8 cache halves what is looked back on."""
    work = decode_work(a(16), a(8000))
    plain = price(Replica(LLAMA_8B, device()), work)
    narrow = Precision(Dtype.FP8, Dtype.FP8, Dtype.BF16, Dtype.FP8, Dtype.BF16)
    quick = price(Replica(LLAMA_8B, device(), precision=narrow), work)
    assert float(quick.parts["mlp"]) < 0.75 * float(plain.parts["mlp"])
    assert float(quick.parts["attention"]) < 0.65 * float(plain.parts["attention"])
    assert float(plain.moved - quick.moved) > 16 * 8000 * 131_072 / 2
