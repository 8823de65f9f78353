"""What vLLM would refuse or get wrong is found before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engines.vllm.adapter import VllmAdapter
from disagg.errors import Problem
from disagg.topology.instances import plan_instances
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import pair

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
DRAFT = {"model": "draft", "num_speculative_tokens": 3}


def check(topology: Topology) -> tuple[list[Problem], list[Problem]]:
    return VllmAdapter().check(topology, plan_instances(topology))


def errors(topology: Topology) -> list[str]:
    return [str(problem) for problem in check(topology)[0]]


def warnings(topology: Topology) -> list[str]:
    return [str(problem) for problem in check(topology)[1]]


@pytest.mark.parametrize("platform", [Platform.CPU, Platform.CUDA, Platform.ROCM])
def test_a_plain_pair_has_nothing_to_complain_about(platform: Platform) -> None:
    """The quickstart shows no warning."""
    assert check(pair(platform)) == ([], [])


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"encode": {}}, "encode", "not served by this release"),
        ({"kv_store": {"url": "redis://h:1"}}, "kv_store", "not served by this release"),
        ({"link": {"transport": "shared-memory"}}, "link.transport", "NIXL"),
        ({"link": {"lease_s": 7.5}}, "link.lease_s", "write 8"),
        ({"kv_cache_dtype": "mxint8"}, "kv_cache_dtype", "Qualcomm's format"),
        ({"block_size": 16}, "block_size", "multiple of 32 tokens, not 16"),
        ({"engine_args": {"block-size": 48}}, "engine_args.block-size", "multiple of 32 tokens, not 48"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype", "no format of vLLM"),
        ({"quantization": "mxfp6"}, "quantization", "Qualcomm's weight format"),
        ({"decode": {"override_qaic_config": {"mos": 1}}}, "decode.override_qaic_config", "platform qaic"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens", "fewer than max_num_seqs 64"),
        ({"max_model_len": 128, "prefill": {"max_seq_len_to_capture": 256}}, "prefill.max_seq_len_to_capture", "128"),
        (
            {"max_model_len": 512, "max_num_batched_tokens": 256, "engine_args": {"enable-chunked-prefill": False}},
            "max_num_batched_tokens",
            "at least max_model_len 512",
        ),
        ({"decode": {"parallel": {"context": 2}}}, "decode.parallel.context", "not supported"),
        ({"decode": {"parallel": {"expert": 8}}}, "decode.parallel.expert", "write 1"),
        ({"decode": {"engine_args": {"api-key": "k"}}}, "decode.engine_args.api-key", "router"),
        ({"engine_args": {"kv-transfer-config": {}}}, "engine_args.kv-transfer-config", "link"),
        ({"engine_args": {"ssl-keyfile": "k"}}, "engine_args.ssl-keyfile", "TLS"),
        ({"engine_args": {"disable-log-stats": True}}, "engine_args.disable-log-stats", "metrics"),
        ({"engine_args": {"enforce-eagr": True}}, "engine_args.enforce-eagr", "--enforce-eager"),
        ({"engine_args": {"dtype": "bfloat61"}}, "engine_args.dtype", "bfloat16"),
        ({"engine_args": {"block-size": "big"}}, "engine_args.block-size", "whole number"),
        ({"block_size": 32, "engine_args": {"block-size": 16}}, "engine_args.block-size", "contradicts block_size"),
        ({"env": {"HF_TOKEN": "x"}}, "env.HF_TOKEN", "export it"),
        ({"decode": {"env": {"CUDA_VISIBLE_DEVICES": "1"}}}, "decode.env.CUDA_VISIBLE_DEVICES", "device_groups"),
        (
            {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}, "engine_args": {"kv-cache-memory-bytes": "1G"}},
            "env.VLLM_CPU_KVCACHE_SPACE",
            "keep one",
        ),
        ({"env": {"VLLM_PLUGINS": "other"}}, "env.VLLM_PLUGINS", "disagg_cpu"),
        ({"prefill": {"parallel": {"tensor": 2}}}, "prefill.device_groups", "1 cores for 2 ranks"),
    ],
)
def test_what_cannot_work_is_an_error_at_its_place(fields: dict[str, Any], where: str, words: str) -> None:
    """The problem names the field and says what to do."""
    found = check(pair(**fields))[0]
    assert [p.where for p in found if words in p.message][:1] == [where], found


def test_accelerators_take_small_blocks() -> None:
    """The limit is that of the attention on CPU."""
    assert errors(pair(Platform.CUDA, block_size=16)) == []


def test_a_device_group_has_to_match_the_parallel_shape_on_accelerators() -> None:
    """Four devices and one rank would leave three idle without a word."""
    found = errors(pair(Platform.CUDA, prefill={"device_groups": ["0..3"]}, decode={"device_groups": ["4"]}))
    assert len(found) == 1
    assert "tensor: 4" in found[0]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"block_size": 32}, {"block_size": 64}),
        ({"block_size": 32}, {}),
        ({}, {"kv_cache_dtype": "fp8"}),
        ({"engine_args": {"dtype": "float16"}}, {}),
        ({"engine_args": {"block-size": 128}}, {"engine_args": {"block-size": 256}}),
        ({"engine_args": {"block-size": 128}}, {"block_size": 256}),
        ({}, {"engine_args": {"chat-template": "other.jinja"}}),
        ({"engine_args": {"tokenizer": "a"}}, {"engine_args": {"tokenizer": "b"}}),
        ({"engine_args": {"hf-overrides.rope_theta": 1}}, {}),
        ({}, {"quantization": "fp8"}),
        ({"engine_args": {"enable-lora": True}}, {}),
    ],
)
def test_what_shapes_kv_or_prompt_must_be_equal(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """A larger block on decode, or another template, gives status 200 and wrong words."""
    found = errors(pair(prefill=prefill, decode=decode))
    assert len(found) == 1
    assert "both need the same" in found[0]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"engine_args": {"dtype": "auto"}}, {}),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "bfloat16"}),
        ({"engine_args": {"max-logprobs": 5}}, {}),
        ({"max_num_seqs": 1}, {"max_num_seqs": 64}),
        ({"block_size": 64}, {"engine_args": {"block-size": 64}}),
    ],
)
def test_what_may_differ_or_is_said_in_other_words_passes(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Stages are tuned apart from each other; that is what they are separate for."""
    assert errors(pair(prefill=prefill, decode=decode)) == []


def test_unequal_context_limits_are_told() -> None:
    """A prompt that only prefill takes costs its time, and its KV waits for the end of the lease."""
    assert any("lease" in w for w in warnings(pair(prefill={"max_model_len": 4096}, decode={"max_model_len": 2048})))


def test_n_gram_on_decode_alone_is_fine() -> None:
    """It has no KV of its own."""
    assert check(pair(decode={"speculative_config": NGRAM})) == ([], [])


def test_a_draft_model_on_decode_alone_is_refused_with_the_way_out() -> None:
    """vLLM stops with 'number of KV layers must match', which tells nobody what to do."""
    found = errors(pair(decode={"speculative_config": DRAFT}))
    assert len(found) == 1
    assert "--prefill-speculative-config" in found[0]


def test_the_same_draft_on_both_sides_is_fine_and_token_counts_may_differ() -> None:
    """Only what shapes the draft's KV has to agree."""
    more = {**DRAFT, "num_speculative_tokens": 5}
    assert errors(pair(prefill={"speculative_config": DRAFT}, decode={"speculative_config": more})) == []


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_hidden_state_drafts_must_match_on_both_sides(method: str) -> None:
    """Their state travels with the prompt's KV."""
    config = {"method": method, "model": "head", "num_speculative_tokens": 2}
    assert errors(pair(prefill={"speculative_config": config}, decode={"speculative_config": config})) == []
    other = {**config, "model": "another"}
    found = errors(pair(prefill={"speculative_config": other}, decode={"speculative_config": config}))
    assert any("decode.speculative_config.model" in e for e in found)
    assert errors(pair(decode={"speculative_config": config})) != []
    assert errors(pair(prefill={"speculative_config": config})) != []


def test_n_gram_on_prefill_is_told_to_be_useless() -> None:
    """Prefill makes one token and has nothing to propose."""
    assert any("no effect" in w for w in warnings(pair(prefill={"speculative_config": NGRAM})))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_speculative_tokens": 3}, "method or a draft model"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "above"),
        ({**NGRAM, "promt_lookup_max": 2}, "did you mean prompt_lookup_max"),
        ({**NGRAM, "draft_override_qaic_config": {}}, "platform qaic"),
        ({**DRAFT, "speculative_model": "other"}, "two spellings"),
    ],
)
def test_faulty_speculative_settings_are_told(config: dict[str, Any], words: str) -> None:
    """Each fault in words, before vLLM finds it a minute later."""
    assert any(words in e for e in errors(pair(decode={"speculative_config": config})))


def test_everything_is_told_at_once_and_each_thing_once() -> None:
    """Fixing one problem at a time, with a start in between, wastes an afternoon."""
    topology = pair(
        kv_cache_dtype="mxint8",
        encode={},
        link={"transport": "shared-memory", "handoff_store_mb": 64},
        engine_args={"model": "x"},
        prefill={"replicas": 3, "device_groups": None},
        decode={"speculative_config": DRAFT, "device_groups": None},
    )
    found, odd = check(topology)
    assert len({p.where for p in found}) >= 5
    assert len(found) == len(set(found))
    assert [p.where for p in odd] == ["link.handoff_store_mb"]


def test_unknown_flags_can_be_allowed_but_reserved_ones_cannot() -> None:
    """A newer vLLM's flag is one setting away; the handoff is not."""
    assert errors(pair(engine_args={"brand-new": 1}, allow_unknown_engine_args=True)) == []
    assert errors(pair(engine_args={"kv-transfer-conf": "{}"}, allow_unknown_engine_args=True)) != []
