"""The metrics page: vLLM's names for what this engine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.stats import Histogram
from disagg.http.messages import Header

CONTENT_TYPE: Header = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")
_Samples = Iterable[tuple[str, float]]


class Page:
    """A page in Prometheus' text format; every sample carries the engine's labels."""

    def __init__(self, model: str) -> None:
        self._base = ['engine="0"', f'model_name="{model}"']
        self._common = ",".join(self._base)
        self.lines: list[str] = []

    def family(self, name: str, kind: str, text: str, samples: _Samples) -> None:
        """Several samples, each with one more label or none."""
        lines = self.lines
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        for extra, value in samples:
            labels = ",".join(sorted([*self._base, extra])) if extra else self._common
            lines.append(f"{name}{{{labels}}} {float(value)}")

    def gauge(self, name: str, text: str, value: float) -> None:
        """One gauge of vLLM's."""
        self.family(f"vllm:{name}", "gauge", text, [("", value)])

    def counter(self, name: str, text: str, value: float) -> None:
        """One counter of vLLM's."""
        self.family(f"vllm:{name}_total", "counter", text, [("", value)])

    def histogram(self, name: str, text: str, data: Histogram) -> None:
        """One histogram of vLLM's."""
        full, lines, labels = f"vllm:{name}", self.lines, self._common
        lines.append(f"# HELP {full} {text}")
        lines.append(f"# TYPE {full} histogram")
        running = 0
        for bound, count in zip((*data.bounds, float("inf")), data.counts, strict=True):
            running += count
            shown = "+Inf" if bound == float("inf") else str(float(bound))
            lines.append(f'{full}_bucket{{engine="0",le="{shown}",{self._base[1]}}} {float(running)}')
        lines.append(f"{full}_count{{{labels}}} {float(running)}")
        lines.append(f"{full}_sum{{{labels}}} {data.total}")

    def plain(self, name: str, kind: str, text: str, samples: _Samples) -> None:
        """Samples without the engine's labels."""
        self.lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
        self.lines += (f"{name}{labels} {float(value)}" for labels, value in samples)


def render(engine: Engine, created: float, served: Counter[tuple[str, str, int]]) -> bytes:
    """The page.

    Args:
        engine: Whose it is.
        created: When it started, in seconds since 1970.
        served: Requests by path, method and hundred of the status.
    """
    page = Page(engine.settings.served_model_names[0])
    page.plain(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        [("", created)],
    )
    _transfers(page, engine)
    _load(page, engine)
    _tokens(page, engine)
    _times(page, engine)
    _fixed(page, engine)
    rows = [
        (f'{{handler="{path}",method="{method}",status="{hundred}xx"}}', count)
        for (path, method, hundred), count in served.items()
    ]
    page.plain("http_requests_total", "counter", "Total number of requests by method, status and handler.", rows)
    return ("\n".join(page.lines) + "\n").encode()


def _transfers(page: Page, engine: Engine) -> None:
    counters, leases, stats = engine.counters, engine.leases, engine.stats
    page.histogram("nixl_xfer_time_seconds", "Histogram of transfer duration for KV transfers.", stats.transfer)
    page.histogram("nixl_bytes_transferred", "Histogram of bytes transferred per KV transfer.", stats.transfer_bytes)
    page.counter("nixl_num_failed_transfers", "Number of failed KV cache transfers.", counters.failed_loads)
    page.counter("nixl_num_failed_notifications", "Number of failed KV cache notifications.", 0)
    page.counter("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", leases.expired)
    page.counter("nixl_num_notifications_after_expiry", "Notifications for requests that were gone.", leases.late)


def _load(page: Page, engine: Engine) -> None:
    page.gauge("num_requests_running", "Number of requests in model execution batches.", len(engine.running))
    page.gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.queued)
    by_reason = [
        ('reason="capacity"', engine.queued - len(engine.loading)),
        ('reason="deferred"', len(engine.loading)),
    ]
    page.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", by_reason)
    by_stage = [
        ('stage="waiting_to_start"', len(engine.waiting) - sum(seq.remote is None for seq in engine.waiting)),
        ('stage="in_progress"', len(engine.loading)),
        ('stage="completed_waiting"', len(engine.ready)),
    ]
    text = "Number of waiting requests by KV load stage."
    page.family("vllm:num_requests_kv_fetch_by_stage", "gauge", text, by_stage)
    page.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.pool.usage)


def _tokens(page: Page, engine: Engine) -> None:
    counters = engine.counters
    page.counter("prefix_cache_queries", "Prefix cache queries, in tokens.", counters.prefix_queries)
    page.counter("prefix_cache_hits", "Prefix cache hits, in tokens.", counters.prefix_hits)
    page.counter("external_prefix_cache_queries", "KV connector queries, in tokens.", counters.external_queries)
    page.counter("external_prefix_cache_hits", "KV connector hits, in tokens.", counters.external_hits)
    page.counter("mm_cache_queries", "Multi-modal cache queries, in items.", 0)
    page.counter("mm_cache_hits", "Multi-modal cache hits, in items.", 0)
    page.counter("num_preemptions", "Cumulative number of preemptions.", counters.preemptions)
    page.counter("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens)
    by_source = [
        ('source="local_compute"', counters.computed_prompt_tokens),
        ('source="local_cache_hit"', counters.local_hit_tokens),
        ('source="external_kv_transfer"', counters.loaded_tokens),
    ]
    page.family("vllm:prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.", by_source)
    cached = counters.local_hit_tokens + counters.loaded_tokens
    page.counter("prompt_tokens_cached", "Number of cached prompt tokens (local and external).", cached)
    by_tier = [
        ('source="device"', counters.local_hit_tokens),
        ('source="p2p"', counters.loaded_tokens),
        *((f'source="{name}"', 0) for name in ("host", "disk", "external_unspecified")),
    ]
    page.family("vllm:prompt_tokens_cached_by_source_total", "counter", "Cached tokens by tier.", by_tier)
    page.counter("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens)
    finished = [(f'finished_reason="{reason}"', float(count)) for reason, count in counters.finished.items()]
    finished.append(('finished_reason="repetition"', 0.0))
    page.family("vllm:request_success_total", "counter", "Count of successfully processed requests.", finished)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        page.counter(f"spec_decode_num_{name}", f"Speculative decoding: number of {name.replace('_', ' ')}.", 0)


def _times(page: Page, engine: Engine) -> None:
    stats = engine.stats
    for name, text, data in (
        ("request_prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
        ("request_generation_tokens", "Number of generation tokens processed.", stats.output_tokens),
        ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", stats.step_tokens),
        ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", stats.max_tokens),
        ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", stats.first_token),
        ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", stats.inter_token),
        ("request_time_per_output_token_seconds", "Time per output token of a request.", stats.per_token),
        ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", stats.whole),
        ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", stats.queue),
        ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", stats.inference),
        ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", stats.prefill),
        ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", stats.decode),
    ):
        page.histogram(name, text, data)


def _fixed(page: Page, engine: Engine) -> None:
    settings = engine.settings
    states = [
        ('sleep_state="awake"', 1.0),
        ('sleep_state="weights_offloaded"', 0.0),
        ('sleep_state="discard_all"', 0.0),
    ]
    page.family("vllm:engine_sleep_state", "gauge", "Engine sleep state.", states)
    info = ",".join(
        [
            f'{{block_size="{settings.block_size}"',
            f'enable_prefix_caching="{settings.prefix_caching}"',
            'engine="0"',
            f'num_gpu_blocks="{settings.num_blocks}"}}',
        ]
    )
    page.plain("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(info, 1.0)])
    if settings.lora_modules:
        running = sorted({seq.adapter_name for seq in engine.running if seq.adapter_name is not None})
        waiting = sorted({seq.adapter_name for seq in engine.waiting if seq.adapter_name is not None})
        labels = (
            f'{{max_lora="{len(settings.lora_modules)}",running_lora_adapters="{",".join(running)}",'
            f'waiting_lora_adapters="{",".join(waiting)}"}}'
        )
        page.plain("vllm:lora_requests_info", "gauge", "Running stats on lora requests.", [(labels, 1.0)])
