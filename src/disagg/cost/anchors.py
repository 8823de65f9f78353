"""Measured step times, and what they are good for.

An anchor is a set of steps that somebody timed on one deployment. Within its regime it corrects the model: the ratio
of measured and modelled time is interpolated between the measured steps, so that a measured step is reproduced, and
carried to other loads, lengths and shapes as far as the model tells how they differ. The regime itself (model,
device, number formats, graphs, tokens per step) is never carried: these change by which kernels run.

`anchor_file` reads anchors from JSON; `anchored` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.catalog.precision import Dtype
from disagg.cost.plan import Replica, Shape


@dataclass(frozen=True, slots=True)
class Regime:
    """What must be the same. None where the anchor does not say.

    Attributes:
        model: Name of the model.
        accelerator: Name of the device.
        dense: Format of attention and dense weights.
        experts: Format of the experts' weights.
        activations: Format of the inputs of matrix products.
        kv: Format of the KV cache.
        graphs: Whether steps were captured as graphs.
        step_tokens: Tokens that a sequence computed in a decode step: 1, or proposals + 1.
    """

    model: str
    accelerator: str | None = None
    dense: Dtype | None = None
    experts: Dtype | None = None
    activations: Dtype | None = None
    kv: Dtype | None = None
    graphs: bool | None = None
    step_tokens: int = 1


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One timed step.

    Attributes:
        sequences: Sequences that decoded, or prompts that were computed.
        tokens: Tokens that each of them computed.
        context: Tokens that each had in the cache before.
        seconds: Time of the step.
    """

    sequences: float
    tokens: float
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Anchor:
    """Timed steps of one deployment.

    Attributes:
        source: Who measured it with what, one line.
        regime: What it is valid for.
        shape: How the model was spread.
        decode: Steps in which sequences decoded.
        prefill: Steps in which prompts were computed.
    """

    source: str
    regime: Regime
    shape: Shape
    decode: tuple[MeasuredStep, ...]
    prefill: tuple[MeasuredStep, ...]


def refusal(anchor: Anchor, replica: Replica, step_tokens: int = 1) -> str | None:
    """Why an anchor says nothing about a replica; None if it does.

    Args:
        anchor: The anchor.
        replica: What is to be priced.
        step_tokens: Tokens that its sequences compute per decode step.
    """
    regime, precision = anchor.regime, replica.precision
    known = {
        "model": (regime.model, replica.model.name),
        "accelerator": (regime.accelerator, replica.accelerator.name),
        "format of dense weights": (regime.dense, precision.dense),
        "format of experts": (regime.experts, precision.experts),
        "format of activations": (regime.activations, precision.activations),
        "format of the KV cache": (regime.kv, precision.kv),
        "capture as graphs": (regime.graphs, replica.habits.graphs),
        "tokens per decode step": (regime.step_tokens, step_tokens),
    }
    differing = [
        f"{name} is {_shown(there)} there and {_shown(here)} here"
        for name, (there, here) in known.items()
        if there is not None and _same(there) != _same(here)
    ]
    return "; ".join(differing) or None


def _same(value: object) -> object:
    """Names are compared without regard to case, and without the publisher before a slash."""
    return value.rsplit("/", 1)[-1].casefold() if isinstance(value, str) else value


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
