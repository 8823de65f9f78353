"""How a replica computes: its devices and their number formats and habits. The cost model's settings."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.catalog.accelerator import Accelerator
from disagg.catalog.model import Model
from disagg.catalog.precision import Dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """How one replica spreads over devices.

    Attributes:
        tensor: Ranks that share each dense layer.
        pipeline: Stages of consecutive layers.
        expert: Ranks that share the experts; 1 leaves them where tensor parallelism puts them.
        attention_data: Ranks of attention that each take a part of the requests, within `tensor`.
        context: Ranks that share one sequence's KV cache, within `tensor`.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    attention_data: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """Devices of one replica: tensor x pipeline, or more if experts are spread wider."""
        return max(self.tensor * self.pipeline, self.expert)

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.devices // self.pipeline

    @property
    def attention_tensor(self) -> int:
        """Ranks that share one sequence's attention (its heads, and with `context` its cache)."""
        return self.tensor // self.attention_data

    @property
    def attention_groups(self) -> int:
        """Groups of a stage that each take a part of the requests: more than `attention_data` where experts are
        spread over more devices than tensor x pipeline, since these devices compute attention too."""
        return self.stage_devices // self.attention_tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks of one stage that share the experts of a layer."""
        return min(self.expert, self.stage_devices)

    @property
    def expert_tensor(self) -> int:
        """Ranks that share one expert."""
        return self.stage_devices // self.expert_ranks

    @property
    def shared_ranks(self) -> int:
        """Ranks that divide the experts that all tokens pass.

        Where experts are spread over ranks that hold different tokens, every attention group passes its own through
        them; otherwise they are divided like a dense layer.
        """
        spread = self.attention_groups > 1 and self.expert_ranks > 1
        return self.attention_tensor if spread else self.tensor


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats.

    Attributes:
        dense: Weights of attention and dense feed-forward layers.
        experts: Weights of routed experts.
        activations: What matrix products take as input; their peak is that of the wider of weight and activation.
        kv: The KV cache.
        head: Weights of embedding and head.
    """

    dense: Dtype = Dtype.BF16
    experts: Dtype = Dtype.BF16
    activations: Dtype = Dtype.BF16
    kv: Dtype = Dtype.BF16
    head: Dtype = Dtype.BF16


@dataclass(frozen=True, slots=True)
class Habits:
    """What an engine adds to, or saves on, its kernels. Times in seconds; None takes the accelerator's figure.

    Attributes:
        step_overhead: Host time of a step that the device waits for.
        graphs: Whether decode steps are captured as graphs (no launch cost per kernel).
        launch: Launch cost of a kernel where steps are not captured.
        kernels_per_layer: Kernels that a layer launches.
        fused_casts: Whether norms and activation functions write the format of the next product's inputs themselves;
            a cast is a kernel of its own otherwise.
        mixed_penalty: Extra share that a step costs that holds prompts and decoding sequences.
        prefill_overlap: Largest share of communication that prefill hides behind arithmetic.
        decode_overlap: The same for decode.
        allreduce: Algorithm of all-reduce: auto, ring, one_shot, two_shot, hierarchical.
        alltoall: Algorithm of all-to-all: auto, direct, single_shot, hierarchical.
        expert_balance: Load of the busiest expert rank over the mean.
        redundant_experts: Copies of busy experts.
        routing_skew: Exponent of a Zipf law of expert popularity; 0 for uniform.
        windowed_decode: Whether decode reads only the window of windowed layers.
    """

    step_overhead: float | None = None
    graphs: bool = True
    launch: float | None = None
    kernels_per_layer: int = 12
    fused_casts: bool = True
    mixed_penalty: float = 0.0
    prefill_overlap: float = 0.0
    decode_overlap: float = 0.0
    allreduce: str = "auto"
    alltoall: str = "auto"
    expert_balance: float = 1.0
    redundant_experts: int = 0
    routing_skew: float = 0.0
    windowed_decode: bool = True


@dataclass(frozen=True, slots=True)
class Replica:
    """One instance of a pool as the cost model sees it."""

    model: Model
    accelerator: Accelerator
    shape: Shape = Shape()
    precision: Precision = Precision()
    habits: Habits = Habits()
