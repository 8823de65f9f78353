"""The topology: every field that a user can set, with its unit, default and effect.

These models are the single source of the file format, of the JSON Schema, of the flags' help and of the
reference page. They are frozen; constructing one touches no file and no device. What a field *means* for an
engine is the adapter's business (`engines`), whether fields fit together is `topology.checks`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from disagg.topology import forms
from disagg.topology.projection_spec import Projection
from disagg.topology.router_spec import Router
from disagg.topology.values import (
    Count,
    EngineArgs,
    Env,
    Folder,
    Groups,
    Host,
    KvCacheDtype,
    Name,
    Names,
    Port,
    Ports,
    QaicConfig,
    Rate,
    Seconds,
    Spec,
    SpeculativeConfig,
    Tokens,
)
from disagg.topology.workload_spec import Workload


class Stage(StrEnum):
    """A part of a request's life that runs on devices of its own."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Platform(StrEnum):
    """What the device ids of a group are, and which engine runs on them."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    QAIC = "qaic"
    EMULATED = "emulated"


class ParallelShape(Spec):
    """How one instance spreads over its devices."""

    tensor: Count = 1
    """Tensor-parallel ranks: devices that share each layer."""
    pipeline: Count = 1
    """Pipeline stages: devices that each hold some of the layers."""
    data: Count = 1
    """Data-parallel ranks inside the instance."""
    expert: Count = 1
    """Expert-parallel ranks; 1 leaves experts where tensor parallelism puts them."""
    context: Count = 1
    """Context-parallel ranks: devices that share one sequence's KV cache."""


class Pool(Spec):
    """All instances of one stage. A field that is not set takes the topology's value of the same name."""

    replicas: Count | None = None
    """Number of instances. Follows from device_groups or ports if either is given, else 1."""
    device_groups: Groups | None = None
    """One group of device ids per instance: 0..15, 0,2,4 or a mixture. By platform the ids are CPU cores, CUDA or HIP
    devices, or Qualcomm QIDs. Without groups the launcher may share out CPU cores evenly."""
    ports: Ports | None = None
    """One HTTP port per instance. Counted up from 9600 (colocated), 9700 (encode), 9800 (decode) or 9900 (prefill) if
    not given, past ports that are in use elsewhere in the topology."""
    parallel: ParallelShape = ParallelShape()
    """Parallel shape of each instance."""
    max_num_seqs: Count | None = None
    """Batch: the most sequences that an instance runs at once."""
    max_num_batched_tokens: Tokens | None = None
    """Token budget of one engine step."""
    max_seq_len_to_capture: Tokens | None = None
    """Prompt tokens per iteration (chunk)."""
    max_model_len: Tokens | None = None
    """Context limit of this stage in tokens, prompt and completion."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Number format of the KV cache. Prefill and decode need the same one."""
    block_size: Count | None = None
    """Tokens per KV block. Prefill and decode need the same one."""
    quantization: Name | None = None
    """Weight quantisation, by the engine's name for it."""
    override_qaic_config: QaicConfig | None = None
    """Compile settings of the stage's binary on Qualcomm Cloud AI: items key:value, key=value or key (meaning true)
    separated by spaces, or a JSON object."""
    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding settings as the engine takes them, a JSON object. On decode: proposals are made and
    verified there."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """Further flags of the engine for this stage, without the leading dashes."""
    env: Env = Field(default_factory=dict)
    """Further environment variables for this stage's processes."""


class Link(Spec):
    """The way of the KV cache from prefill to decode."""

    transport: Literal["auto", "nixl", "shared-memory"] = "auto"
    """What moves the bytes; auto takes the platform's own."""
    dialect: Literal["auto", "nixl-pull", "nixl-push", "mooncake", "lmcache", "sglang"] = "auto"
    """The protocol in which prefill and decode are told of each other's KV; auto takes the engine's own."""
    bootstrap_port: Port = 8998
    """First port of the range for bootstrap servers of prefill instances (Mooncake, SGLang)."""
    bandwidth_gbps: Rate | None = None
    """Bandwidth in Gbit/s for projection and simulation; not needed to serve."""
    latency_s: Annotated[float, Field(ge=0, le=60)] | None = None
    """Time before the first byte, for projection and simulation."""
    lease_s: Seconds = 30.0
    """How long prefill keeps a finished prompt's KV for a decode instance to fetch."""
    on_failure: Literal["fail", "recompute"] = "recompute"
    """What decode does when the KV cannot be fetched."""
    side_channel_port: Port = 5600
    """First port of the range in which instances tell each other where their KV is."""
    handoff_port: Port = 5656
    """Port of the hand-off service on platforms that have one (qaic)."""
    handoff_store_mb: Count | None = None
    """Size of the hand-off store in MB (qaic)."""
    handoff_store_entries: Count | None = None
    """Size of the hand-off store in entries (qaic)."""


class KvStore(Spec):
    """A KV cache shared by the fleet."""

    url: Annotated[str, AfterValidator(forms.store_url), Field(json_schema_extra={"pattern": forms.STORE_URL})]
    """Where it is: lmcache://host:port, redis://host:port, mooncake://host:port or file:///directory."""
    chunk_tokens: Count = 256
    """Tokens per stored chunk."""
    capacity_gb: Rate | None = None
    """Size of the first tier."""


class Topology(Spec):
    """What is deployed: model, pools, link, router."""

    model: Name
    """Model name or local path, the same for all stages."""
    served_model_name: Names | None = None
    """Names that clients use for the model; the model's own if not given."""
    platform: Platform = Platform.AUTO
    """cpu, cuda, rocm, qaic, emulated, or auto: what the machine has."""
    host: Host = "127.0.0.1"
    """Address that the endpoint binds to. Loopback unless set."""
    port: Port = 8000
    """Port of the one endpoint that clients see."""
    encode: Pool | None = None
    """Vision encoders (xEyPD, xEyPzD)."""
    prefill: Pool | None = None
    """Prompt processing (xPyD, xEyPzD)."""
    decode: Pool | None = None
    """Token generation; without a prefill pool it does both (xEyPD)."""
    colocated: Pool | None = None
    """Instances that prefill and decode together, as a baseline."""
    link: Link = Link()
    """KV transfer from prefill to decode."""
    kv_store: KvStore | None = None
    """KV cache shared by the fleet."""
    router: Router = Router()
    """The endpoint in front of the pools."""
    workload: Workload = Workload()
    """What is asked of the deployment, for projection, simulation and benchmarks; serving ignores it."""
    projection: Projection = Projection()
    """Devices and cost model of a projection; serving ignores it."""
    max_num_seqs: Count | None = None
    """Batch of every stage that does not set its own."""
    max_num_batched_tokens: Tokens | None = None
    """Token budget of a step for every stage that does not set its own."""
    max_seq_len_to_capture: Tokens | None = None
    """Prompt tokens per iteration for every stage that does not set its own."""
    max_model_len: Tokens | None = None
    """Context limit in tokens, prompt and completion; the model's own if not given."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Number format of the KV cache for all stages."""
    block_size: Count | None = None
    """Tokens per KV block for all stages."""
    quantization: Name | None = None
    """Weight quantisation for all stages."""
    override_qaic_config: QaicConfig | None = None
    """Compile settings on Qualcomm Cloud AI for all stages that do not set their own."""
    generation_config: Name | None = None
    """Where default sampling parameters come from; `vllm` ignores the model's generation_config.json."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    """Random seed of the engines."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """Further flags of the engine for all stages, without the leading dashes."""
    env: Env = Field(default_factory=dict)
    """Further environment variables for all engine processes."""
    allow_unknown_engine_args: bool = False
    """Pass engine flags through that this version does not know, instead of refusing them."""
    log_dir: Folder | None = None
    """Folder for the instances' log files; one per run under the user's state directory if not given."""
    verbosity: Annotated[int, Field(ge=0, le=5)] = 0
    """How much the engines log (-v, -vv, -vvv)."""

    def pool(self, stage: Stage) -> Pool | None:
        """The pool of a stage, if the topology has one."""
        pools: dict[Stage, Pool | None] = {
            Stage.ENCODE: self.encode,
            Stage.PREFILL: self.prefill,
            Stage.DECODE: self.decode,
            Stage.COLOCATED: self.colocated,
        }
        return pools[stage]

    def stages(self) -> tuple[Stage, ...]:
        """The stages that have a pool, in the order of a request's life."""
        return tuple(s for s in Stage if self.pool(s) is not None)
