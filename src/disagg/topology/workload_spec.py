"""The workload section of a topology: what is asked of it. Serving needs none of it; sizing it does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from disagg.topology.values import Count, Spec, Tokens

Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, le=1_000_000_000)]
Whole = Annotated[int, Field(ge=0, le=100_000_000)]


class Workload(Spec):
    """Requests that a projection, a simulation or a benchmark assumes."""

    input_len: Tokens = 1024
    """Prompt length in tokens."""
    output_len: Tokens = 128
    """Generated tokens of a request."""
    max_concurrency: Count | None = None
    """Requests in the system at once; the most that fit in memory if not given."""
    max_context_len: Tokens | None = None
    """Tokens of a sequence that KV memory is planned for; prompt and answer if not given."""
    request_rate: NonNegative = 0.0
    """Offered load in requests/s; 0 for clients that each wait for their answer."""
    arrival_model: Literal["closed", "none", "poisson", "deterministic"] = "closed"
    """How requests arrive: closed (none is the same) keeps a fixed number in the system; poisson and deterministic
    arrive at the request rate."""
    think_ms: NonNegative = 0.0
    """Time between a client's answer and its next request in a closed loop, in ms."""
    prefix_cache_hit_rate: Share = 0.0
    """Share of a prompt that is found in the prefix cache; a property of the traffic, asserted and not computed."""
    images_per_request: Whole = 0
    """Pictures per request, for models that take them."""
    image_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Side of a square picture in pixels; the encoder's own size if not given."""
    stream_interval: Count = 1
    """Tokens that are held back until so many are sent at once."""
    request_overhead_ms: NonNegative = 0.0
    """Fixed time of a request outside the engines, in ms; in TTFT."""
    tokenize_overhead_us: NonNegative = 0.0
    """Time to tokenise, in us per prompt token; in TTFT."""
    detokenize_overhead_us: NonNegative = 0.0
    """Time to turn a token into text, in us; in ITL and end-to-end latency, not in throughput."""
