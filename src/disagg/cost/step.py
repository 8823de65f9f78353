"""Seconds of one step of a replica, with its parts."""

from __future__ import annotations

import dataclasses

import numpy as np

from disagg.catalog.figure import Figure, Origin
from disagg.catalog.model import Block, DenseMlp, LatentAttention, LinearAttention, MoeMlp, SoftmaxAttention
from disagg.cost.attention import softmax_operators
from disagg.cost.collectives import Exchange, network, network_notes, seconds
from disagg.cost.device import Device
from disagg.cost.ends import embedding_operators, head_operators, norm_operators
from disagg.cost.host import DEFAULT_LAUNCH, DEFAULT_STEP_OVERHEAD
from disagg.cost.latent import latent_operators
from disagg.cost.linear import linear_operators
from disagg.cost.load import Load, load, ratio
from disagg.cost.mlp import dense_operators, moe_operators
from disagg.cost.operator import Operator
from disagg.cost.plan import Replica
from disagg.cost.roofline import by_part, timed, total
from disagg.cost.traffic import block_traffic, end_traffic
from disagg.cost.work import Array, Estimate, Work

EXTRA_LAUNCHES = 6
"""Kernels of a step that belong to no layer: embedding, last norm, head, sampling."""


def price(replica: Replica, work: Work) -> Estimate:
    """Price one step.

    Args:
        replica: Model, device, shape, formats and habits.
        work: What the step computes; arrays that broadcast with each other.

    Returns:
        Seconds and parts, of the shape that the arrays of `work` broadcast to. Decoding sequences of a pipeline
        count one step for all of them: each stage passes every micro-batch once.

    Raises:
        ConfigError: If a figure that is needed is missing from the accelerator.
    """
    return StepModel(replica).price(work)


class StepModel:
    """Prices steps of one replica. Keeps what does not depend on the work, for callers that price many.

    Raises:
        ConfigError: If a figure that is needed is missing from the accelerator.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._device = Device(replica.accelerator)
        self._network = network(replica.accelerator, replica.shape.devices)
        habits = replica.habits
        self._overhead = self._habit(
            "host time of a step", habits.step_overhead, replica.accelerator.step_overhead, DEFAULT_STEP_OVERHEAD
        )
        self._launching = 0.0 if habits.graphs else self._launches()
        if self._network is not None:
            self._device.notes.update(dict.fromkeys(network_notes(self._network)))

    def price(self, work: Work) -> Estimate:
        """Price one step; see `price`."""
        replica = self.replica
        at = load(work, replica.shape)
        points = np.broadcast_shapes(*(np.shape(x) for x in (at.tokens, at.context, at.before, at.logits)))
        operators, exchanges = step_operators(replica, at), step_exchanges(replica, at)
        time = timed(operators, self._device, points)
        parts = by_part(operators, time.seconds)
        computing, waiting = time.seconds.sum(axis=0), time.waiting.sum(axis=0)
        self._add_communication(parts, exchanges, computing, at)
        self._add_host(parts, work, at)
        whole = np.zeros(points)
        for name, part in parts.items():
            parts[name] = np.broadcast_to(part, points)
            whole = whole + part
        per_device = self._work_share(at)
        return Estimate(
            seconds=whole,
            parts=parts,
            memory_bound=ratio(waiting * self._fill(at), whole),
            flops=total([operator.flops for operator in operators], points) * per_device,
            moved=total([operator.moved for operator in operators], points) * per_device,
            notes=tuple(self._device.notes),
        )

    def _fill(self, at: Load) -> Array | float:
        """By how much a pipeline's step is longer than one micro-batch: (m + stages - 1) / stages for m of them."""
        stages = self.replica.shape.pipeline
        return (at.batches + stages - 1) / stages

    def _work_share(self, at: Load) -> Array | float:
        """Part of a micro-batch's work over all layers that one device does in a step.

        A stage has 1 / stages of the layers. It sees as many micro-batches of sequences as there are stages, and
        each prompt once.
        """
        stages = self.replica.shape.pipeline
        passes: Array = np.where(at.sequences > 0, np.maximum(at.batches, stages), at.batches) / stages
        return passes

    def _add_communication(
        self, parts: dict[str, Array], exchanges: list[Exchange], computing: Array, at: Load
    ) -> None:
        """Add what arithmetic does not hide: all but min(ceiling, computing / communicating) of it.

        The ceiling of a mixed step lies between those of its phases, by their shares of the tokens.
        """
        if self._network is None:
            return
        habits = self.replica.habits
        kinds: dict[str, Array] = {}
        for exchange in exchanges:
            time = seconds(exchange, self._network, allreduce=habits.allreduce, alltoall=habits.alltoall)
            kinds[exchange.kind.value] = kinds.get(exchange.kind.value, 0.0) + time
        whole = sum(kinds.values(), np.zeros(()))
        prompts = ratio(at.prompt_tokens, at.tokens)
        ceiling = habits.prefill_overlap * prompts + habits.decode_overlap * (1.0 - prompts)
        exposed = 1.0 - np.minimum(ceiling, ratio(computing, whole))
        parts.update({kind: time * exposed for kind, time in kinds.items()})

    def _add_host(self, parts: dict[str, Array], work: Work, at: Load) -> None:
        """Pipeline fill, launches that the device waits for, the penalty of mixed steps, the host's own time."""
        habits = self.replica.habits
        fill = self._fill(at)
        parts.update({name: part * fill for name, part in parts.items()})
        busy = sum(parts.values(), np.zeros(()))
        if self._launching:
            parts["launch"] = np.where(at.tokens > 0, np.maximum(self._launching - busy, 0.0), 0.0)
        if habits.mixed_penalty:
            mixed = (work.prompt_tokens > 0) & (work.sequences > 0)
            parts["mixed"] = np.where(mixed, habits.mixed_penalty * busy, 0.0)
        parts["host"] = np.where(at.tokens > 0, self._overhead, 0.0)

    def _launches(self) -> float:
        """Seconds that launching the kernels of a step one by one takes the host."""
        habits, layers = self.replica.habits, self.replica.model.layers
        each = self._habit("launch of a kernel", habits.launch, self.replica.accelerator.launch, DEFAULT_LAUNCH)
        return (layers * habits.kernels_per_layer + EXTRA_LAUNCHES) * each

    def _habit(self, name: str, given: float | None, figure: Figure | None, default: Figure) -> float:
        """What the user gave, else the accelerator's figure, else the default; noted."""
        taken = Figure(given, Origin.USER, "given") if given is not None else figure or default
        self._device.notes.setdefault(f"{name}: {taken}")
        return taken.value


def step_operators(replica: Replica, at: Load) -> list[Operator]:
    """All operators of a micro-batch over all stages."""
    operators = embedding_operators(replica, at)
    for block in replica.model.blocks:
        operators += block_operators(block, replica, at)
    operators += head_operators(replica, at)
    if not replica.habits.fused_casts:
        return operators
    # What is left of a fused cast is what it moves.
    return [dataclasses.replace(one, calls=0.0) if one.part == "casts" else one for one in operators]


def block_operators(block: Block, replica: Replica, at: Load) -> list[Operator]:
    """Operators of the layers of one block."""
    count = float(block.count)
    parts = (block.attention is not None) + (block.mlp is not None)
    operators = norm_operators(replica, at, count * parts)
    match block.attention:
        case SoftmaxAttention() as attention:
            operators += softmax_operators(attention, replica, at, count)
        case LatentAttention() as attention:
            operators += latent_operators(attention, replica, at, count)
        case LinearAttention() as attention:
            operators += linear_operators(attention, replica, at, count)
        case None:
            pass
    match block.mlp:
        case DenseMlp() as mlp:
            operators += dense_operators(mlp, replica, at, count)
        case MoeMlp() as mlp:
            operators += moe_operators(mlp, replica, at, count)
        case None:
            pass
    return operators


def step_exchanges(replica: Replica, at: Load) -> list[Exchange]:
    """All collectives of a micro-batch over all stages."""
    exchanges: list[Exchange] = []
    for block in replica.model.blocks:
        exchanges += block_traffic(block, replica, at)
    return exchanges + end_traffic(replica, at)
