"""What an engine's host adds to the kernels of a step: named, documented defaults.

Engines differ far more by how their host works than by their kernels. A scheduler that prepares the next step while
the device computes leaves a fraction of a millisecond; one that waits for each step's tokens first leaves several.
"""

from __future__ import annotations

from disagg.catalog.figure import Figure, Origin

OVERLAPPED_HOST = Figure(
    0.3e-3,
    Origin.DEFAULT,
    "host that prepares a step while the device computes the one before: vllm-project/vllm issue 10634 estimates "
    "0.2 to 0.3 ms",
)
"""Seconds that a device waits for its host per step under asynchronous scheduling, which engines default to."""

SERIAL_HOST = Figure(
    2.5e-3,
    Origin.DEFAULT,
    "host that works between steps: vllm-project/vllm issue 10634 measures 5 to 6 ms at 256 sequences in 2024 and "
    "expects 2 to 3 ms after optimisation",
)
"""The same for a host that works between steps."""

DEFAULT_STEP_OVERHEAD = OVERLAPPED_HOST

DEFAULT_LAUNCH = Figure(
    3.0e-6, Origin.DEFAULT, "time per operation in the system descriptions of ai-dynamo/aiconfigurator 0.12"
)
"""Seconds of one kernel launch where steps are not captured as graphs."""
