"""`disagg.launch.handoff_probe`: prompts and counters of a probe. What it does over engines is in tests/faults."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import UpstreamProtocolError
from disagg.launch.handoff_probe import probe_body, sum_metric
from tests.support.launch_fakes import PLAN

TEXT = """\
# HELP vllm:external_prefix_cache_hits_total Tokens.
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
vllm:external_prefix_cache_hits_total{engine="1",model_name="m"} 6.0
# TYPE vllm:external_prefix_cache_hits_created gauge
vllm:external_prefix_cache_hits_created{engine="0"} 1.7e9
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 7.0
"""


@pytest.mark.parametrize("name", ["vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_hits_total"])
def test_a_counter_is_summed_over_its_labels(name: str) -> None:
    """With or without its suffix, and without the time of its creation or other counters."""
    assert sum_metric(TEXT, name) == 1030


def test_a_selector_takes_the_samples_with_its_labels() -> None:
    """KV that another engine sent is one label of a counter that also counts what was computed here."""
    text = (
        "# TYPE vllm:prompt_tokens_by_source counter\n"
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 4591.0\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 418.0\n'
        'vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 2.0\n'
    )
    assert sum_metric(text, 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}') == 420
    assert sum_metric(text, "vllm:prompt_tokens_by_source_total") == 5011


def test_a_counter_that_is_not_there_yet_is_zero() -> None:
    """Engines show some counters only after the first event."""
    assert sum_metric(TEXT, "vllm:none") == 0


def test_metrics_that_are_not_prometheus_text_are_the_engines_fault() -> None:
    """The error says what could not be read."""
    with pytest.raises(UpstreamProtocolError, match="metrics"):
        sum_metric("<html>{", "x")


def prompt(block_tokens: int | None, max_model_len: int | None) -> list[str]:
    body = probe_body(replace(PLAN, block_tokens=block_tokens, max_model_len=max_model_len))
    fields = {name: msgspec.json.decode(value) for name, value in body.items()}
    assert fields["stream"] is False
    assert fields["temperature"] == 0
    words: list[str] = fields["prompt"].split()
    return words


def test_no_two_probes_have_a_prefix_in_common() -> None:
    """A prompt that was sent before could be answered from a cache, and would prove nothing."""
    assert len({prompt(16, None)[0] + prompt(16, None)[1] for _ in range(50)}) == 50


@given(st.one_of(st.none(), st.integers(1, 4096)), st.integers(8, 100_000))
def test_a_prompt_fits_the_context(block_tokens: int | None, max_model_len: int) -> None:
    """Even if each word were five tokens, prompt and answer are inside the limit."""
    assert 1 <= len(prompt(block_tokens, max_model_len)) * 5 <= max(5, max_model_len - 2)


def test_a_prompt_spans_blocks() -> None:
    """At one or two tokens a word, at least one whole block has to travel."""
    assert len(prompt(128, None)) >= 128
