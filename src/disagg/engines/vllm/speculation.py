"""Speculative decoding on vLLM: what its settings may hold, and what prefill and decode must agree on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from pydantic import JsonValue

from disagg.engines.findings import shown
from disagg.engines.speculation import translate

KNOWN_KEYS = frozenset(
    {
        "attention_backend",
        "code_revision",
        "disable_eagle_block_drop",
        "disable_padded_drafter_batch",
        "draft_load_config",
        "draft_sample_method",
        "draft_tensor_parallel_size",
        "enable_adaptive_verification",
        "enforce_eager",
        "index_share_for_mtp_iteration",
        "kv_cache_dtype",
        "max_model_len",
        "method",
        "model",
        "moe_backend",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "parallel_drafting",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "quantization",
        "rejection_sample_method",
        "revision",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
        "use_heterogeneous_vocab",
        "use_local_argmax_reduction",
    }
)
"""Keys of `--speculative-config` in vLLM 0.32."""

_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"})
"""Methods that keep no KV cache of their own, so decode may use them alone."""

_SHARED_KEYS = (
    "method",
    "model",
    "revision",
    "code_revision",
    "quantization",
    "kv_cache_dtype",
    "parallel_drafting",
    "draft_tensor_parallel_size",
)
"""What shapes a draft's KV cache. The number of proposed tokens may differ between prefill and decode."""


def needs_prefill(config: Mapping[str, JsonValue]) -> bool:
    """Whether prefill must be set up with the same draft because the draft's KV travels with the prompt's."""
    method = config.get("method")
    if method is None and config.get("model") in ("ngram", "[ngram]"):
        return False
    return not (isinstance(method, str) and method in _WITHOUT_KV)


def disagreements(prefill: Mapping[str, JsonValue], decode: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Keys in which the two stages' drafts differ although they must not."""
    return tuple(key for key in _SHARED_KEYS if prefill.get(key) != decode.get(key))


def faults(given: Mapping[str, JsonValue]) -> list[str]:
    """What is wrong with the settings themselves, a sentence each."""
    translation = translate(given)
    config = translation.config
    found = [f"{pair} are two spellings of one setting and differ; keep the second" for pair in translation.conflicts]
    for key in config:
        if key in KNOWN_KEYS:
            continue
        if key.endswith("qaic_config"):
            found.append(f"{key} belongs to platform qaic; on this platform the draft runs on the instance's devices")
            continue
        near = difflib.get_close_matches(key, KNOWN_KEYS, n=1)
        found.append(
            f"{key} is not a setting of vLLM's speculative decoding{f'; did you mean {near[0]}?' if near else ''}"
        )
    if config.get("method") is None and config.get("model") is None:
        found.append(
            'needs a method or a draft model: {"method": "ngram", "num_speculative_tokens": 5} or '
            '{"model": "<draft>", "num_speculative_tokens": 3}'
        )
    found.extend(
        f"{key} is {shown(config[key])}; it is a name"
        for key in ("method", "model")
        if not isinstance(config.get(key), str | None)
    )
    tokens = config.get("num_speculative_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        found.append(f"num_speculative_tokens is {tokens!r}; it is a whole number from 1")
    if config.get("method") in ("ngram", "ngram_gpu") and tokens is None:
        found.append("num_speculative_tokens is missing; n-gram speculation needs it, such as 5")
    low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        found.append(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
    return found
