"""From the projection's settings to the number formats and habits of the cost model."""

from __future__ import annotations

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.model import Model
from disagg.catalog.precision import Dtype
from disagg.cost.plan import Habits, Precision
from disagg.errors import ConfigError, Problem
from disagg.topology.effective import stage_value
from disagg.topology.projection_spec import Projection
from disagg.topology.spec import Stage, Topology

# Host time of a step in seconds, extra share of a mixed step, whether kernels are captured: InferaSim's presets.
_GRAPH_MODES: dict[str, tuple[float, float, bool]] = {
    "none": (40e-6, 0.0, False),
    "piecewise": (8e-6, 0.15, True),
    "full": (3e-6, 0.0, True),
}
_FUSED = 0.7
_DTYPES = {
    **{dtype.value: dtype for dtype in Dtype},
    "auto": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "fp8_e4m3": Dtype.FP8,
    "fp8_e5m2": Dtype.FP8,
    "fp4": Dtype.NVFP4,
}
_QUANTIZATIONS = {
    "fp8": Dtype.FP8,
    "fbgemm_fp8": Dtype.FP8,
    "mxfp4": Dtype.MXFP4,
    "mxfp6": Dtype.MXFP6,
    "mxint8": Dtype.MXINT8,
    "modelopt": Dtype.FP8,
    "modelopt_fp4": Dtype.NVFP4,
    "awq": Dtype.INT4,
    "awq_marlin": Dtype.INT4,
    "gptq": Dtype.INT4,
    "gptq_marlin": Dtype.INT4,
    "int8": Dtype.INT8,
}


def habits_of(settings: Projection) -> Habits:
    """How the engines work; explicit values win over the preset of a graph mode."""
    overhead: float | None = None
    penalty, graphs = 0.0, settings.kernel_launch_latency_us is None
    if settings.cudagraph_mode is not None:
        overhead, penalty, graphs = _GRAPH_MODES[settings.cudagraph_mode]
    if settings.decode_step_overhead_us is not None:
        overhead = settings.decode_step_overhead_us / 1e6
    if settings.mixed_batch_penalty is not None:
        penalty = settings.mixed_batch_penalty
    launch = settings.kernel_launch_latency_us
    factor = _FUSED if settings.fused_kernels else 1.0
    return Habits(
        step_overhead=overhead,
        graphs=graphs,
        launch=launch / 1e6 * factor if launch is not None else None,
        kernels_per_layer=settings.kernels_per_layer,
        mixed_penalty=penalty,
        prefill_overlap=settings.prefill_comm_overlap,
        decode_overlap=settings.decode_comm_overlap,
        allreduce=settings.tp_allreduce_algo,
        alltoall=settings.ep_a2a_algo,
        expert_balance=settings.ep_load_balance,
        redundant_experts=settings.redundant_experts,
        routing_skew=settings.moe_routing_skew,
        windowed_decode=settings.windowed_decode,
    )


def precision_of(topology: Topology, stage: Stage, model: Model, device: Accelerator) -> Precision:
    """Number formats: what is said, else those of the checkpoint.

    Raises:
        ConfigError: If the name of a quantisation says nothing of its number format.
    """
    settings = topology.projection
    dense, experts = model.dense_dtype or model.dtype, model.dtype
    scheme = stage_value(topology, stage, "quantization")
    if scheme is not None:
        if scheme not in _QUANTIZATIONS:
            advice = "give the number format of the weights with --weight-dtype"
            raise ConfigError([Problem("quantization", f"{scheme}: what it stores is not known here; {advice}")])
        dense = experts = _QUANTIZATIONS[scheme]
    if settings.weight_dtype is not None:
        dense = experts = _DTYPES[settings.weight_dtype]
    if settings.linear_weight_dtype is not None:
        dense = _DTYPES[settings.linear_weight_dtype]
    if settings.moe_expert_dtype is not None:
        experts = _DTYPES[settings.moe_expert_dtype]
    return Precision(
        dense=dense,
        experts=experts,
        activations=_activations(settings, dense, device),
        kv=_DTYPES[stage_value(topology, stage, "kv_cache_dtype") or "auto"],
        head=Dtype.FP32 if settings.weight_dtype == "fp32" else Dtype.BF16,
    )


def _activations(settings: Projection, weights: Dtype, device: Accelerator) -> Dtype:
    """As wide as the weights where the device multiplies that format, else 16 bits."""
    said = settings.act_quant_dtype
    if said == "none":
        return Dtype.BF16
    if said != "auto":
        return _DTYPES[said]
    return weights if weights in device.peak else Dtype.BF16
