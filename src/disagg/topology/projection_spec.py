"""The projection section of a topology: which devices it is sized for, and how the cost model prices a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from disagg.topology.values import Count, JsonMap, Name, Names, Spec, Tokens
from disagg.topology.workload_spec import NonNegative, Share, Whole

WeightDtype = Literal[
    "fp32", "bf16", "fp16", "fp8", "int8", "int4", "fp4", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "mxint8"
]
Positive = Annotated[float, Field(gt=0, le=1_000_000_000)]


class Projection(Spec):
    """Settings of the projection that serving does not need."""

    accelerator: Name | None = None
    """Device by its name in the catalogue, or a file that describes one. `disagg accelerators` lists them."""
    prefill_accelerator: Name | None = None
    """Device of the prefill pool, where it differs."""
    decode_accelerator: Name | None = None
    """Device of the decode pool, where it differs."""
    disaggregate: bool | None = None
    """Project separate pools; follows from the pools that are given if not said."""
    inference_mode: Literal["performance", "memory", "both"] = "both"
    """Which reports to print."""
    profiling_mode: Literal["benchmark", "simulate", "both"] | None = None
    """Whether step times are measured ones (benchmark: needs anchors), modelled (simulate: leaves anchors aside), or
    both side by side. If not given, anchors count where there are any."""
    serving_model: Literal["continuous", "static"] = "continuous"
    """Colocated engines: continuous batching with mixed steps, or a batch that is prefilled once and then decodes."""
    inference_batch_size: Count = 1
    """Requests of the batch that a static engine is given; no limit on concurrency."""
    ttft_rule: Literal["prompt-part", "whole-step"] = "prompt-part"
    """By how much a waiting prompt delays the next one in a colocated engine: by what its pieces add to the steps, or
    by whole mixed steps."""
    first_output: Literal["decode", "prefill"] = "decode"
    """Which pool makes the token that the client sees first: decode (vLLM), or prefill, which hands it over."""

    weight_dtype: WeightDtype | None = None
    """Number format of all weights; that of the model's checkpoint if not given."""
    linear_weight_dtype: WeightDtype | None = None
    """Number format of attention and dense weights, where it differs."""
    moe_expert_dtype: WeightDtype | None = None
    """Number format of experts' weights, where it differs."""
    act_quant_dtype: Literal["auto", "none", "bf16", "fp16", "fp8", "int8", "mxfp4", "mxfp8", "mxint8"] = "auto"
    """Number format in which activations enter matrix products; auto follows the weights."""

    attention_dp_size: Count = 1
    """Parts that attention's requests are split into, within tensor parallelism; adds no devices."""
    prefill_attention_dp: Count | None = None
    """The same for the prefill pool."""
    decode_attention_dp: Count | None = None
    """The same for the decode pool."""

    decode_admission_steps: Whole = 0
    """Decode steps between two admissions of finished prompts; half of them is added to TTFT."""
    mixed_batch_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    """Extra share of time that a step takes which holds prompts and decoding sequences."""
    decode_step_overhead_us: NonNegative | None = None
    """Host time of a step in us; the accelerator's default if not given."""
    cudagraph_mode: Literal["none", "piecewise", "full"] | None = None
    """How steps are captured: none (40 us of overhead), piecewise (8 us, mixed steps 15 % dearer), full (3 us).
    Explicit values win."""
    kernel_launch_latency_us: NonNegative | None = None
    """Launch time of a kernel in us, where steps are not captured as graphs."""
    kernels_per_layer: Count = 12
    """Kernels that a layer launches."""
    decode_kernel_occupancy_us: NonNegative = 0.0
    """Least time that a kernel holds the device, in us; added to a step also where it is captured."""
    fused_kernels: bool = False
    """Kernels are fused: launch times count 0.7 of what they would."""
    speculative_num_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    """Proposed tokens per decode step; the speculative configuration's own number if not given."""
    speculative_acceptance_rate: Share = 0.0
    """Chance that a proposed token is accepted, given that those before it were."""
    speculative_draft_cost_factor: NonNegative = 0.0
    """Time to propose a token as a share of a decode step of the target."""

    hbm_capacity_gb: Positive | None = None
    """Device memory in GB of 2^30 bytes, in place of the catalogue's."""
    peak_tflops: JsonMap | None = None
    """Peak in TFLOP/s by number format, in place of the catalogue's: {"bf16": 989}."""
    memory_bw_gbps: Positive | None = None
    """Device memory bandwidth in GB/s (10^9 bytes), in place of the catalogue's."""
    kv_cache_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of device memory that weights, activations and KV may use."""
    kv_offload_gb_per_gpu: NonNegative = 0.0
    """Host memory per device for KV, in GB of 2^30 bytes."""
    kv_offload_bw_gbps: Positive = 64.0
    """Bandwidth to it in GB/s."""
    kv_pool_tokens: Tokens | None = None
    """Tokens that a replica's KV pool holds, in place of what memory gives."""
    workload_resident_tokens: Tokens | None = None
    """Tokens that a request keeps in the pool; its context if not given."""
    sliding_window: Tokens | None = None
    """Window of windowed layers in tokens, in place of the model's."""
    sliding_window_layer_fraction: Share | None = None
    """Share of the layers that are windowed, in place of the model's."""
    windowed_decode: bool = True
    """Decode reads only the window of windowed layers, as engines with a hybrid cache manager do."""
    sparse_attention_topk: Tokens | None = None
    """Tokens that sparse attention attends to at most, in place of the model's."""
    attention_backend: Literal["default", "aiter", "ck", "triton", "hip"] = "default"
    """Attention kernels: aiter takes 0.85 of the default's time, ck 0.9, triton 1.0, hip 1.1."""

    tp_allreduce_algo: Literal["auto", "ring", "one_shot", "two_shot", "hierarchical"] = "auto"
    """Algorithm of the all-reduce of tensor parallelism."""
    ep_a2a_algo: Literal["auto", "direct", "single_shot", "hierarchical"] = "auto"
    """Algorithm of the all-to-all of expert parallelism."""
    prefill_comm_overlap: Share = 0.0
    """Largest share of communication that prefill hides behind arithmetic."""
    decode_comm_overlap: Share = 0.0
    """The same for decode."""
    tp_allreduce_efficiency: Positive = 1.0
    """Factor on the bandwidth of all-reduce."""
    ep_a2a_efficiency: Positive = 1.0
    """Factor on the bandwidth of all-to-all."""
    ep_load_balance: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Load of the busiest expert rank over the mean."""
    redundant_experts: Whole = 0
    """Copies of busy experts, which even the load out."""
    moe_routing_skew: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Exponent of a Zipf law of how popular experts are; 0 for equally popular."""

    sampling: bool = True
    """Charge for sampling."""
    sampling_temperature: NonNegative = 1.0
    """Temperature; other than 0 and 1 costs another pass over the logits."""
    sampling_top_k: Whole = 0
    """Top-k; above 0 costs another pass."""
    sampling_top_p: Share = 1.0
    """Top-p; below 1 costs another pass."""

    kv_transfer_bw_gbps: Positive | None = None
    """Bandwidth of the KV link in gigabytes of 2^30 bytes per second: in spite of the name these are bytes, as in the
    tool that this flag is known from. The link section's bandwidth_gbps is in Gbit/s."""
    kv_transfer_latency_us: NonNegative | None = None
    """Time before the first byte of a transfer, in us."""
    transfer_backend: Literal["nixl", "mooncake", "mori"] | None = None
    """Preset of the KV link: nixl 400 GiB/s and 5 us, mooncake 200 and 10, mori 300 and 7. Explicit values win."""

    anchors: Names | None = None
    """Files of measured step times, which replace the model where they apply."""
    prefill_anchors: Names | None = None
    """The same for the prefill pool alone."""
    decode_anchors: Names | None = None
    """The same for the decode pool alone."""

    gpu_cost_per_hour: NonNegative = 0.0
    """Price of a device for an hour; cost lines appear with it."""
