"""Settings that a topology may hold and that a projection does not carry out yet: said, and never ignored."""

from __future__ import annotations

from disagg.errors import Problem
from disagg.topology.spec import Topology

_PROJECTION = (
    "inference_mode",
    "serving_model",
    "inference_batch_size",
    "decode_kernel_occupancy_us",
    "kv_offload_gb_per_gpu",
    "kv_offload_bw_gbps",
    "sliding_window",
    "sliding_window_layer_fraction",
    "sparse_attention_topk",
    "sampling",
    "sampling_temperature",
    "sampling_top_k",
    "sampling_top_p",
)
_WORKLOAD = ("think_ms",)


def not_yet(topology: Topology) -> list[Problem]:
    """One problem for each setting that is not at its default and would change nothing."""
    sections = (("projection", topology.projection, _PROJECTION), ("workload", topology.workload, _WORKLOAD))
    both = topology.projection.profiling_mode == "both"
    told = "both is not carried out by this version; project once with benchmark and once with simulate"
    return [Problem("projection.profiling_mode", told)] * both + [
        Problem(f"{section}.{name}", "is not carried out by this version; leave it out")
        for section, settings, names in sections
        for name in names
        if getattr(settings, name) != type(settings).model_fields[name].default
    ]
