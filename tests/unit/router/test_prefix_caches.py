"""What engines tell about their prefix caches: read off their metrics page, once for each start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import ReadinessProbe
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.http.client import Client
from disagg.router.fleet import Fleet, State
from disagg.router.prefix_caches import UNKNOWN, PrefixCache, PrefixCaches, read_cache_info
from disagg.topology.spec import Stage
from tests.support import mock_engine as mock
from tests.support.mock_engine import MockEngine

PROBE = ReadinessProbe("/health", "/metrics", None, "running", "waiting", cache_info="vllm:cache_config_info")
# As vLLM 0.32 writes it, but for labels that say nothing here.
REAL = (
    b"# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n"
    b'vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",'
    b'effective_attention_block_size="64",enable_prefix_caching="True",engine="0",hash_block_size="None"} 1.0\n'
)


def test_the_adapter_names_the_metric() -> None:
    """Without it no engine would be asked."""
    probe = VllmAdapter().probe()
    assert probe.cache_info is not None
    assert read_cache_info(REAL, probe.cache_info) == PrefixCache(128, off=False)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (REAL, PrefixCache(128)),
        (REAL.replace(b"True", b"False"), PrefixCache(128, off=True)),
        (REAL.replace(b'"128"', b'"None"'), PrefixCache(0)),
        (REAL + REAL.replace(b"128", b"256"), PrefixCache(256)),
        (REAL + REAL.replace(b'caching="True"', b'caching="False"'), PrefixCache(128, off=True)),
        (b"vllm:cache_config_info{} 1.0\n", PrefixCache()),
        (b"# vllm:cache_config_info\n", None),
        (b'vllm:cache_config_info_too{block_size="4"} 1.0\n', None),
        (b"", None),
    ],
)
def test_a_page_is_read(page: bytes, expected: PrefixCache | None) -> None:
    """Of several ranks the largest block counts, and one without a cache is enough to go without."""
    assert read_cache_info(page, "vllm:cache_config_info") == expected


@given(st.binary(max_size=300))
def test_any_page_is_read_without_an_error(text: bytes) -> None:
    """Engines are not trusted to send Prometheus' format: what cannot be read is unknown, no block is negative."""
    found = read_cache_info(text + b"\nvllm:cache_config_info{" + text + b"} 1", "vllm:cache_config_info")
    assert found is None or found.block_size >= 0


async def test_an_engine_is_asked_once_for_each_start_and_again_if_it_did_not_tell() -> None:
    """An answer holds as long as its process; silence holds for some seconds, so that it costs no request much."""
    now, engine, client = [0.0], MockEngine(mock.decoded), Client()
    fleet = Fleet((Stage.DECODE,))
    await engine.start()
    member = fleet.add("decode-0", Stage.DECODE, engine.url, "one")
    fleet.mark("decode-0", "one", State.READY)
    caches = PrefixCaches(client, fleet, PROBE, lambda: now[0])
    try:
        engine.pages["/metrics"] = mock.error(500)
        assert await caches.of(member) == UNKNOWN
        engine.pages["/metrics"] = mock.answers(200, REAL)
        assert await caches.of(member) == UNKNOWN
        now[0] = 6.0
        assert await caches.of(member) == PrefixCache(128)
        engine.pages["/metrics"] = mock.answers(200, REAL.replace(b"128", b"16"))
        now[0] = 1e6
        assert await caches.of(member) == PrefixCache(128)
        successor = fleet.update("decode-0", "two")
        assert await caches.of(successor) == PrefixCache(16)
        engine.pages["/metrics"] = mock.breaks
        assert await caches.of(fleet.update("decode-0", "three")) == UNKNOWN
        assert await PrefixCaches(client, fleet, None, lambda: now[0]).of(successor) == UNKNOWN
    finally:
        await client.close()
        await engine.stop()
