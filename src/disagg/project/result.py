"""What a projection says: figures that know how they came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from disagg.cost.memory import MemoryPlan
from disagg.topology.spec import Stage


class Basis(StrEnum):
    """What a figure rests on."""

    MODELLED = "modelled"
    """Priced by the cost model from catalogue figures and named defaults."""
    MEASURED = "measured"
    """Measured step times, inside the range in which they were taken."""
    TRANSPORTED = "transported"
    """Measured step times, carried to another shape or range."""
    CATALOGUE = "catalogue"
    """Published, as the catalogue has it."""
    GIVEN = "given"
    """Said by the user."""
    COUNTED = "counted"
    """Follows from whole numbers such as replicas and devices."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure.

    Attributes:
        value: Its value in `unit`; text and truth values have the empty unit.
        unit: ms, tok/s, req/s, %, GPUs, GiB ...
        how: How it is made, one line.
        basis: What it rests on.
    """

    value: float | str | bool
    unit: str
    how: str
    basis: Basis = Basis.MODELLED


@dataclass(frozen=True, slots=True)
class Projection:
    """The projection of one topology.

    Attributes:
        mode: `colocated`, `static` or `disaggregated`.
        figures: By stable name.
        first_token: What a first token waits for, in ms, by name; adds up to `ttft_ms`.
        decode_step: What a decode step consists of, in ms, by name.
        prefill: What a prompt's computation consists of, in ms, by name.
        memory: The fullest device of each pool.
        limit: What limits the request rate, in words.
        warnings: What the reader should think about.
        notes: Defaults and catalogue figures that took part.
    """

    mode: str
    figures: Mapping[str, Quantity]
    first_token: Mapping[str, float]
    decode_step: Mapping[str, float]
    prefill: Mapping[str, float]
    memory: Mapping[Stage, MemoryPlan]
    limit: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def number(self, name: str) -> float:
        """The value of a figure that is a number.

        Raises:
            KeyError: If there is no such figure.
            TypeError: If it is text.
        """
        value = self.figures[name].value
        if isinstance(value, str):
            raise TypeError(f"{name} is text")
        return float(value)
