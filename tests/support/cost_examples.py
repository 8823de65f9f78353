"""Models and a device with round or published figures, for tests of the cost model."""

from __future__ import annotations

from disagg.catalog.accelerator import Accelerator, Fabric, Kernel
from disagg.catalog.figure import Figure, Origin
from disagg.catalog.model import (
    Block,
    DenseMlp,
    LatentAttention,
    LinearAttention,
    Model,
    MoeMlp,
    SoftmaxAttention,
)
from disagg.catalog.precision import Dtype


def llama(layers: int, hidden: int, heads: int, width: int, name: str) -> Model:
    """A Llama 3.1 of some size (meta-llama/Llama-3.1-* config.json): 8 KV heads of 128, vocabulary 128 256."""
    attention = SoftmaxAttention(heads=heads, kv_heads=8, head_dim=128, value_dim=128)
    blocks = (Block(layers, attention, DenseMlp(width)),)
    return Model(name, "config.json", hidden, 128256, blocks, tied=False, max_context=131072, dtype=Dtype.BF16)


LLAMA_8B = llama(32, 4096, 32, 14336, "llama-3.1-8b")
LLAMA_70B = llama(80, 8192, 64, 28672, "llama-3.1-70b")

# facebook/opt-13b config.json: as many KV heads as heads, two matrices, biases, a tied head.
OPT_13B = Model(
    "opt-13b",
    "config.json",
    5120,
    50272,
    (Block(40, SoftmaxAttention(40, 40, 128, 128, bias=True), DenseMlp(20480, gated=False)),),
    tied=True,
    max_context=2048,
    dtype=Dtype.FP16,
)

# deepseek-ai/DeepSeek-V3 config.json.
_MLA = LatentAttention(heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
DEEPSEEK_V3 = Model(
    "deepseek-v3",
    "config.json",
    7168,
    129280,
    (
        Block(3, _MLA, DenseMlp(18432)),
        Block(58, _MLA, MoeMlp(experts=256, active=8, width=2048, shared_width=2048)),
    ),
    tied=False,
    max_context=163840,
    dtype=Dtype.FP8,
)

# mistralai/Mixtral-8x7B-v0.1 config.json.
MIXTRAL = Model(
    "mixtral-8x7b",
    "config.json",
    4096,
    32000,
    (Block(32, SoftmaxAttention(32, 8, 128, 128), MoeMlp(experts=8, active=2, width=14336)),),
    tied=False,
    max_context=32768,
    dtype=Dtype.BF16,
)

# google/gemma-2-9b config.json: every second layer looks back on 4096 tokens; tied head.
GEMMA_9B = Model(
    "gemma-2-9b",
    "config.json",
    3584,
    256000,
    (
        Block(21, SoftmaxAttention(16, 8, 256, 256, window=4096), DenseMlp(14336)),
        Block(21, SoftmaxAttention(16, 8, 256, 256), DenseMlp(14336)),
    ),
    tied=True,
    max_context=8192,
    dtype=Dtype.BF16,
)

# Three layers of a gated delta net to one of softmax attention, in small.
HYBRID = Model(
    "hybrid",
    "made up",
    1024,
    32000,
    (
        Block(6, LinearAttention(key_heads=4, value_heads=8, key_dim=128, value_dim=128), DenseMlp(4096)),
        Block(2, SoftmaxAttention(8, 2, 128, 128), DenseMlp(4096)),
    ),
    tied=True,
    max_context=32768,
    dtype=Dtype.BF16,
)

MODELS = (LLAMA_8B, LLAMA_70B, OPT_13B, DEEPSEEK_V3, MIXTRAL, GEMMA_9B, HYBRID)


def figure(value: float) -> Figure:
    """A figure of the test's own."""
    return Figure(value, Origin.USER, "test")


def device(
    *,
    bandwidth: float = 3.35e12,
    peak: float = 989e12,
    link: float = 450e9,
    nodes: int | None = 8,
    efficiency: dict[tuple[Kernel, Dtype], Figure] | None = None,
) -> Accelerator:
    """A device like an H100 SXM (data sheet), with the shares of its peaks that published kernel tables show."""
    shares = {
        (Kernel.GEMM, Dtype.BF16): 0.75,
        (Kernel.GEMM, Dtype.FP8): 0.55,
        (Kernel.WEIGHTS, Dtype.BF16): 0.83,
        (Kernel.WEIGHTS, Dtype.FP8): 0.67,
        (Kernel.DECODE_ATTENTION, Dtype.BF16): 0.81,
        (Kernel.DECODE_ATTENTION, Dtype.FP8): 0.76,
        (Kernel.PREFILL_ATTENTION, Dtype.BF16): 0.49,
        (Kernel.PREFILL_ATTENTION, Dtype.FP8): 0.33,
    }
    return Accelerator(
        name="h100-sxm",
        aliases=(),
        vendor="nvidia",
        peak={Dtype.BF16: figure(peak), Dtype.FP8: figure(2 * peak)},
        memory=figure(80e9),
        bandwidth=figure(bandwidth),
        scale_up=Fabric(figure(link), figure(2e-6), nodes, figure(0.75)),
        scale_out=Fabric(figure(50e9), figure(10e-6), None, figure(0.7)),
        host_link=figure(64e9),
        efficiency={key: figure(value) for key, value in shares.items()} if efficiency is None else efficiency,
    )


def ideal(**changes: float) -> Accelerator:
    """A device whose kernels reach its peaks and start at once: floors can be computed by hand."""
    whole = {(kernel, dtype): figure(1.0) for kernel in Kernel for dtype in Dtype if dtype in (Dtype.BF16, Dtype.FP8)}
    made = device(efficiency=whole, **changes)  # type: ignore[arg-type]
    return Accelerator(
        **{
            **{name: getattr(made, name) for name in made.__dataclass_fields__},
            "kernel_floor": figure(0.0),
            "step_overhead": figure(0.0),
        }
    )
