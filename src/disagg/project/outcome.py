"""What comes out of a steady state, as arrays by operating point. Seconds, and rates per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.cost.work import Array
from disagg.project.first_token import HostTimes, stream_wait
from disagg.project.open_loop import OpenLoop, open_loop
from disagg.project.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """A deployment under a number of clients.

    Attributes:
        first_token: What a first token waits for, by name; adds up to `ttft`.
        ttft: To the first token that a client sees.
        tpot: Per output token inside the engine.
        itl: Between two tokens that a client sees.
        decode_total: From the first to the last token.
        latency: From request to last token.
        step: A decode step of the replica that has most requests.
        mixed_step: A step that also holds a piece of a prompt; equal to `step` where there is none.
        mixed_fraction: Share of such steps.
        pollution: Share of the time that goes into them.
        lift: By what share a token takes longer than in pure decode.
        decode_rate: Output tokens/s of the deployment.
        decode_capacity: Output tokens/s that decode alone could do.
        prefill_rate: Prompt tokens/s that it can compute.
        request_rate: Requests/s that it can serve.
        prefill_limits: Where prefill is what limits that.
        occupancy: Prompts that a prefill replica holds at a time.
        alone: Prefill of one prompt on an idle replica.
        transfer: KV transfer of one request; 0 without a split.
    """

    first_token: Mapping[str, Array]
    ttft: Array
    tpot: Array
    itl: Array
    decode_total: Array
    latency: Array
    step: Array
    mixed_step: Array
    mixed_fraction: Array
    pollution: Array
    lift: Array
    decode_rate: Array
    decode_capacity: Array
    prefill_rate: Array
    request_rate: Array
    prefill_limits: NDArray[np.bool_]
    occupancy: Array
    alone: Array
    transfer: Array

    def under_load(self, offered: float, *, deterministic: bool) -> OpenLoop:
        """The wait of requests that arrive at a rate of their own."""
        return open_loop(offered=np.asarray(offered), sustainable=self.request_rate, deterministic=deterministic)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """What a client sees: the engine's times and what hosts add to them.

    Attributes:
        first_token: Parts of the time to the first token.
        ttft: Their sum.
        itl: Between two tokens.
        decode_total: From the first to the last token.
        latency: From request to last token.
    """

    first_token: Mapping[str, Array]
    ttft: Array
    itl: Array
    decode_total: Array
    latency: Array


def client_times(parts: Mapping[str, Array], total: Array, workload: Workload, host: HostTimes) -> ClientTimes:
    """Add what hosts do to an engine's times.

    Args:
        parts: What the first token waits for in engines and links.
        total: From an engine's first token to its last.
        workload: What a request is.
        host: What hosts add.
    """
    gaps = np.maximum(workload.output_tokens - 1, 1)
    itl = np.where(workload.output_tokens > 1, total / gaps, 0.0)
    held = stream_wait(host.stream_interval, workload.output_tokens, itl)
    first = {
        **parts,
        "tokenisation": host.tokenize * workload.input_tokens,
        "request": np.asarray(host.request),
        "stream buffering": held,
    }
    ttft = sum(first.values(), np.zeros(()))
    rest = total - held
    spoken = host.detokenize * workload.output_tokens
    return ClientTimes(first, ttft, itl + host.detokenize, rest, ttft + rest + spoken)
