"""What is counted, and how long things took, in the buckets of the real engine's histograms."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from disagg.engines.emulated.sequence import FinishReason, Sequence

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
_BYTES = tuple(2048 * 4**n for n in range(12))


class Histogram:
    """Counts of observations by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Stats:
    """All histograms of one engine; times are in seconds."""

    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    per_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    whole: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    inference: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(_COUNTS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(_COUNTS))
    max_tokens: Histogram = field(default_factory=lambda: Histogram(_COUNTS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP))
    transfer: Histogram = field(default_factory=lambda: Histogram(_TRANSFER))
    transfer_bytes: Histogram = field(default_factory=lambda: Histogram(_BYTES))

    def begun(self, seq: Sequence, now: float) -> None:
        """A sequence has its first token."""
        self.first_token.observe(now - seq.arrived)
        seq.first_token = now

    def ended(self, seq: Sequence, now: float) -> None:
        """Record what a finished sequence took."""
        output = len(seq.output)
        self.whole.observe(now - seq.arrived)
        self.queue.observe(seq.scheduled - seq.arrived)
        self.inference.observe(now - seq.scheduled)
        self.prefill.observe(seq.first_token - seq.scheduled)
        self.decode.observe(now - seq.first_token)
        self.per_token.observe((now - seq.first_token) / (output - 1) if output > 1 else 0.0)
        self.prompt_tokens.observe(len(seq.prompt))
        self.output_tokens.observe(output)
        self.max_tokens.observe(seq.sampling.max_tokens)


@dataclass(slots=True)
class Counters:
    """What the metrics page counts, since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    computed_prompt_tokens: int = 0
    local_hit_tokens: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )

    def placed(self, seq: Sequence) -> None:
        """The caches were searched for a sequence."""
        tokens, own = len(seq.prompt), seq.computed - seq.external_tokens
        self.prefix_queries += tokens
        self.prefix_hits += own
        self.external_queries += tokens - own
        self.local_hit_tokens += own

    def received(self, tokens: int) -> None:
        """KV of some tokens was there because another engine had sent it ahead."""
        self.external_hits += tokens
        self.loaded_tokens += tokens
        self.loads += 1
