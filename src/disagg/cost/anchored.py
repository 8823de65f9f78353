"""A replica's step times, corrected by measured ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from disagg.cost.anchors import Anchor, MeasuredStep, refusal
from disagg.cost.load import ratio
from disagg.cost.plan import Replica, Shape
from disagg.cost.scatter import Scatter
from disagg.cost.step import StepModel
from disagg.cost.work import Array, Estimate, Work, decode_work, prompt_work
from disagg.errors import ConfigError, Problem


class Standing(IntEnum):
    """What stands behind a time, from the loosest to the firmest."""

    MODELLED = 0
    """The model alone: nothing of the kind was measured."""
    FAR = 1
    """Carried by the model over more than a doubling of load, length or devices: low confidence."""
    TRANSPORTED = 2
    """Carried by the model over a doubling at most."""
    INTERPOLATED = 3
    """Between measured steps of the same shape."""


class AnchoredModel:
    """Prices steps like `StepModel`, with measured times where there are any.

    Args:
        replica: What to price.
        anchors: Measured steps. Those of another regime are left out; of the others the nearest in shape counts.
        step_tokens: Tokens that sequences compute per decode step.

    Attributes:
        used: The anchors that count.
        refused: Why each other one does not.

    Raises:
        ConfigError: If no anchor is of the replica's regime, with the reason for each.
    """

    def __init__(self, replica: Replica, anchors: Sequence[Anchor], step_tokens: int = 1) -> None:
        self.replica = replica
        self._model = StepModel(replica)
        reasons = {anchor.source: refusal(anchor, replica, step_tokens) for anchor in anchors}
        fitting = [anchor for anchor in anchors if refusal(anchor, replica, step_tokens) is None]
        self.refused = tuple(f"{source}: {reason}" for source, reason in reasons.items() if reason)
        if not fitting:
            raise ConfigError(
                [Problem(f"anchor {source}", f"measured something else: {why}") for source, why in reasons.items()]
                or [Problem("anchors", "none given")]
            )
        self._decode = _nearest([a for a in fitting if a.decode], replica)
        self._prefill = _nearest([a for a in fitting if a.prefill], replica)
        chosen = {id(a): a for a in (self._decode, self._prefill) if a is not None}
        self.used = tuple(chosen.values())
        self._decode_ratio = _ratios(self._decode, replica, decode=True)
        self._prefill_ratio = _ratios(self._prefill, replica, decode=False)

    def price(self, work: Work) -> Estimate:
        """Price one step; see `step.price`. A mixed step is corrected by both kinds, in proportion to their times."""
        plain = self._model.price(work)
        factor = self._factor(work)
        notes = tuple(f"measured steps: {anchor.source}" for anchor in self.used)
        return dataclasses.replace(
            plain,
            seconds=plain.seconds * factor,
            parts={name: part * factor for name, part in plain.parts.items()},
            notes=plain.notes + notes,
        )

    def standing(self, work: Work) -> NDArray[np.int64]:
        """What stands behind each point: values of `Standing`. A mixed step is as firm as its looser part."""
        decode = _standing(self._decode, self._decode_ratio, self.replica, (work.sequences, work.context))
        prompt = _standing(
            self._prefill, self._prefill_ratio, self.replica, (work.prompt_tokens, work.prompt_context)
        )
        firmest = int(Standing.INTERPOLATED)
        parts = (
            np.where(np.asarray(work.sequences) > 0, decode, firmest),
            np.where(np.asarray(work.prompt_tokens) > 0, prompt, firmest),
        )
        looser: NDArray[np.int64] = np.minimum(*parts).astype(np.int64)
        return looser

    def _factor(self, work: Work) -> Array:
        decode = _corrected(self._decode_ratio, work.sequences, work.context)
        prompt = _corrected(self._prefill_ratio, work.prompt_tokens, work.prompt_context)
        only_decoding, only_prompts = np.all(work.prompt_tokens == 0), np.all(work.sequences == 0)
        if only_decoding or only_prompts:
            return decode if only_decoding else prompt
        zero = np.zeros(())
        first = self._model.price(dataclasses.replace(work, sequences=zero)).seconds
        second = self._model.price(
            dataclasses.replace(work, prompt_tokens=zero, prompt_sequences=zero, prompt_outputs=zero)
        ).seconds
        return ratio(first * prompt + second * decode, first + second)


def _nearest(anchors: list[Anchor], replica: Replica) -> Anchor | None:
    """The anchor whose shape is most like the replica's; of equal ones the one with more steps, then the first."""
    if not anchors:
        return None
    return min(anchors, key=lambda a: (_distance(a.shape, replica.shape), -len(a.decode) - len(a.prefill)))


def _distance(one: Shape, other: Shape) -> float:
    """Doublings between two shapes, over all their dimensions."""
    fields = [field.name for field in dataclasses.fields(Shape)]
    return sum(abs(float(np.log2(getattr(one, name) / getattr(other, name)))) for name in fields)


def _ratios(anchor: Anchor | None, replica: Replica, *, decode: bool) -> Scatter | None:
    """Measured over modelled time at each measured step, modelled in the shape that it was measured in."""
    if anchor is None:
        return None
    model = StepModel(dataclasses.replace(replica, shape=anchor.shape))
    points = []
    for step in anchor.decode if decode else anchor.prefill:
        work = _work(step, decode=decode)
        first = work.sequences if decode else work.prompt_tokens
        second = work.context if decode else work.prompt_context
        points.append((float(first), float(second), step.seconds / float(model.price(work).seconds)))
    return Scatter(points)


def _work(step: MeasuredStep, *, decode: bool) -> Work:
    count, tokens, context = (np.asarray(x, dtype=np.float64) for x in (step.sequences, step.tokens, step.context))
    return decode_work(count, context, tokens) if decode else prompt_work(count, tokens, context)


def _corrected(scatter: Scatter | None, first: Array, second: Array) -> Array:
    """Factor of each point; 1 where nothing was measured."""
    return np.ones(()) if scatter is None else scatter.at(first, second)


def _standing(
    anchor: Anchor | None, scatter: Scatter | None, replica: Replica, at: tuple[Array, Array]
) -> NDArray[np.int64]:
    if anchor is None or scatter is None:
        return np.asarray(int(Standing.MODELLED))
    out = scatter.doublings(*at) + _distance(anchor.shape, replica.shape)
    found: NDArray[np.int64] = np.where(
        out <= 1e-9,
        int(Standing.INTERPOLATED),
        np.where(out <= 1.0 + 1e-9, int(Standing.TRANSPORTED), int(Standing.FAR)),
    )
    return found
