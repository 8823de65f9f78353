"""What is added to a first token besides computing it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disagg.cost.work import Array


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What hosts add. Seconds.

    Attributes:
        request: Fixed time of a request (HTTP, routing, templates).
        tokenize: Per token of the prompt.
        detokenize: Per token of the answer.
        admission_steps: Decode steps between two admissions of finished prompts to the decode batch.
        stream_interval: Tokens that are held back until so many can be sent at once.
    """

    request: float = 0.0
    tokenize: float = 0.0
    detokenize: float = 0.0
    admission_steps: int = 0
    stream_interval: int = 1


def admission_wait(steps: int, step: Array) -> Array:
    """Mean seconds until the decode batch takes new sequences: half of the interval, for evenly spread arrivals."""
    return 0.5 * steps * step


def stream_wait(interval: int, output_tokens: Array, itl: Array) -> Array:
    """Seconds by which holding tokens back delays the first one that a client sees; taken off the rest."""
    held: Array = np.maximum(np.minimum(interval - 1, output_tokens - 1), 0)
    return held * itl
