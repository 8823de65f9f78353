"""Conditions that hold soon, with a limit on how soon."""

from __future__ import annotations

import time

from tests.support.deployment import Deployment
from tests.support.wire import metric


def engines_are_idle(shape: Deployment, *, within_s: float) -> None:
    """Fail unless every engine's running and waiting counts come to 0."""
    deadline = time.monotonic() + within_s
    while True:
        counts = {
            f"{stage}-{i}": (metric(m, "vllm:num_requests_running"), metric(m, "vllm:num_requests_waiting"))
            for stage in shape.engines
            for i, m in enumerate(shape.engine_metrics(stage))
        }
        if all(c == (0, 0) for c in counts.values()):
            return
        assert time.monotonic() < deadline, f"(running, waiting) after {within_s} s: {counts}"
        time.sleep(0.2)


def every_instance_is_ready(shape: Deployment, *, within_s: float) -> None:
    """Fail unless every instance takes traffic again."""
    deadline = time.monotonic() + within_s
    while not shape.all_ready():
        assert time.monotonic() < deadline, shape.output()[-4000:]
        time.sleep(0.5)
