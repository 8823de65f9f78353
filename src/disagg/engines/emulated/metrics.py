"""The metrics page: vLLM's names for what this engine has."""

from __future__ import annotations

from collections.abc import Iterable

from disagg.engines.emulated.engine import Engine
from disagg.http.messages import Header

CONTENT_TYPE: Header = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")
_Samples = Iterable[tuple[str, float]]


def render(engine: Engine) -> bytes:
    """The page in Prometheus' text format."""
    counters, leases = engine.counters, engine.leases
    base = ['engine="0"', f'model_name="{engine.settings.served_model_names[0]}"']
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: _Samples) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        for extra, value in samples:
            labels = ",".join(sorted([*base, extra] if extra else base))
            lines.append(f"{name}{{{labels}}} {float(value)}")

    def gauge(name: str, text: str, value: float) -> None:
        family(f"vllm:{name}", "gauge", text, [("", value)])

    def counter(name: str, text: str, value: float) -> None:
        family(f"vllm:{name}_total", "counter", text, [("", value)])

    gauge("num_requests_running", "Number of requests in model execution batches.", len(engine.running))
    gauge("num_requests_waiting", "Number of requests waiting to be processed.", engine.queued)
    by_reason = [
        ('reason="capacity"', engine.queued - len(engine.loading)),
        ('reason="deferred"', len(engine.loading)),
    ]
    family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", by_reason)
    by_stage = [
        ('stage="waiting_to_start"', len(engine.waiting) - sum(seq.remote is None for seq in engine.waiting)),
        ('stage="in_progress"', len(engine.loading)),
        ('stage="completed_waiting"', len(engine.ready)),
    ]
    family("vllm:num_requests_kv_fetch_by_stage", "gauge", "Number of waiting requests by KV load stage.", by_stage)
    gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.pool.usage)
    counter("prefix_cache_queries", "Prefix cache queries, in tokens.", counters.prefix_queries)
    counter("prefix_cache_hits", "Prefix cache hits, in tokens.", counters.prefix_hits)
    counter("external_prefix_cache_queries", "KV connector queries, in tokens.", counters.external_queries)
    counter("external_prefix_cache_hits", "KV connector hits, in tokens.", counters.external_hits)
    counter("num_preemptions", "Cumulative number of preemptions.", counters.preemptions)
    counter("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens)
    by_source = [
        ('source="local_compute"', counters.computed_prompt_tokens),
        ('source="local_cache_hit"', counters.local_hit_tokens),
        ('source="external_kv_transfer"', counters.loaded_tokens),
    ]
    family("vllm:prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.", by_source)
    counter("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens)
    finished = [(f'finished_reason="{reason}"', count) for reason, count in counters.finished.items()]
    family("vllm:request_success_total", "counter", "Count of successfully processed requests.", finished)
    counter("nixl_num_failed_transfers", "Number of failed KV cache transfers.", counters.failed_loads)
    counter("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.", leases.expired)
    counter("nixl_num_notifications_after_expiry", "Notifications for requests that were gone.", leases.late)
    return ("\n".join(lines) + "\n").encode()
