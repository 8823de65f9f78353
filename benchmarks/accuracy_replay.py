"""A run of requests with their own arrivals through one replica, step by step: first come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disagg.cost.plan import Replica
from disagg.cost.step import StepModel
from disagg.cost.work import Work


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds from the start of the run, tokens."""

    at: float
    prompt: int
    answer: int


@dataclass(slots=True)
class _Held:
    """A request that the engine has begun."""

    index: int
    done: int
    made: int = 0


def replay(replica: Replica, arrivals: Sequence[Arrival], most: int, budget: int) -> list[tuple[float, float]]:
    """First-token and last-token times of every request, in the order given (which is that of arrival).

    Args:
        replica: The engine.
        arrivals: What comes when.
        most: Sequences that it holds at a time.
        budget: Tokens of a step; those that decode come first.
    """
    model, now, coming = StepModel(replica), 0.0, 0
    held: list[_Held] = []
    first, last = [0.0] * len(arrivals), [0.0] * len(arrivals)
    while held or coming < len(arrivals):
        if not held:
            now = max(now, arrivals[coming].at)
        decoding = [one for one in held if one.made]
        left, pieces = budget - len(decoding), []
        for one in (one for one in held if not one.made):
            pieces.append((one, min(left, arrivals[one.index].prompt - one.done)))
            left -= pieces[-1][1]
        while left > 0 and len(held) < most and coming < len(arrivals) and arrivals[coming].at <= now:
            new = _Held(coming, 0)
            held.append(new)
            pieces.append((new, min(left, arrivals[coming].prompt)))
            left -= pieces[-1][1]
            coming += 1
        pieces = [(one, piece) for one, piece in pieces if piece > 0]
        now += _seconds(model, pieces, [arrivals[one.index].prompt + one.made for one in decoding], arrivals)
        for one, piece in pieces:
            one.done += piece
            if one.done == arrivals[one.index].prompt:
                one.made, first[one.index] = 1, now
        for one in decoding:
            one.made += 1
        for one in [one for one in held if one.made >= arrivals[one.index].answer]:
            last[one.index] = now
            held.remove(one)
    return list(zip(first, last, strict=True))


def _seconds(
    model: StepModel, pieces: Sequence[tuple[_Held, int]], contexts: Sequence[int], arrivals: Sequence[Arrival]
) -> float:
    tokens = sum(piece for _, piece in pieces)
    reach = sum(piece * (one.done + (piece + 1) / 2) for one, piece in pieces) / tokens if tokens else 0.0
    ends = sum(one.done + piece == arrivals[one.index].prompt for one, piece in pieces)
    context = sum(contexts) / len(contexts) if contexts else 0.0
    figures = (tokens, reach, len(pieces), ends, len(contexts), context, 1.0)
    return float(model.price(Work(*(np.asarray(float(x)) for x in figures))).seconds)
