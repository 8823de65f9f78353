"""What prefill and decode must have in common because decode reads prefill's KV."""

from __future__ import annotations

from pydantic import JsonValue

from disagg.engines.findings import Findings, error, shown, warning
from disagg.engines.settings import stage_settings
from disagg.engines.speculation import translate
from disagg.engines.vllm.command import stage_flags, where_set, whole
from disagg.engines.vllm.speculation import disagreements, needs_prefill
from disagg.topology.spec import Stage, Topology

# Flags that change the KV, or the tokens that a prompt becomes. NIXL compares only some of them; the others end in
# wrong words with status 200.
_SAME_ON_BOTH = (
    "dtype",
    "kv-cache-dtype",
    "block-size",
    "quantization",
    "attention-backend",
    "attention-config",
    "kv-cache-dtype-skip-layers",
    "disable-hybrid-kv-cache-manager",
    "disable-sliding-window",
    "prefix-match-unit",
    "mamba-block-size",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "revision",
    "code-revision",
    "hf-overrides",
    "hf-config-path",
    "config-format",
    "model-impl",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "skip-tokenizer-init",
    "chat-template",
    "chat-template-content-format",
    "default-chat-template-kwargs",
    "trust-request-chat-template",
    "exclude-tools-when-tool-choice-none",
    "cohere-format",
    "mm-processor-kwargs",
    "media-io-kwargs",
    "trust-request-mm-kwargs",
    "interleave-mm-strings",
    "limit-mm-per-prompt",
    "enable-lora",
    "lora-modules",
    "lora-dtype",
)
_AUTO = frozenset({"dtype", "kv-cache-dtype", "tokenizer-mode", "chat-template-content-format", "model-impl"})


def findings(topology: Topology) -> Findings:
    """Differences between prefill and decode that break a handoff, or waste one."""
    yield from _flags(topology)
    yield from _speculation(topology)


def _flags(topology: Topology) -> Findings:
    prefill, decode = stage_flags(topology, Stage.PREFILL), stage_flags(topology, Stage.DECODE)
    names = dict.fromkeys((*prefill, *decode))
    for name in names:
        # A dotted name sets a part of a flag, and has to agree as the flag has.
        if name.partition(".")[0] not in _SAME_ON_BOTH:
            continue
        default: JsonValue = "auto" if name in _AUTO else None
        ours, theirs = prefill.get(name, default), decode.get(name, default)
        if shown(ours) != shown(theirs):
            stage = Stage.DECODE if name in decode else Stage.PREFILL
            yield error(
                where_set(topology, stage, name),
                f"prefill has {shown(ours)} and decode has {shown(theirs)}; decode reads prefill's KV, "
                "so both need the same: set it for all stages",
            )
    on_prefill, on_decode = whole(prefill, "max-model-len"), whole(decode, "max-model-len")
    if on_prefill != on_decode:
        yield warning(
            where_set(topology, Stage.DECODE, "max-model-len"),
            f"prefill has {shown(on_prefill)} and decode {shown(on_decode)}; prompts that fit only one are refused, "
            "and KV of a prompt that decode refuses waits for the end of its lease",
        )


def _speculation(topology: Topology) -> Findings:
    on_prefill = stage_settings(topology, Stage.PREFILL).speculative_config
    on_decode = stage_settings(topology, Stage.DECODE).speculative_config
    prefill = translate(on_prefill).config if on_prefill is not None else None
    decode = translate(on_decode).config if on_decode is not None else None
    if prefill is not None and not needs_prefill(prefill):
        yield warning("prefill.speculative_config", "has no effect: prefill makes one token per request")
    elif prefill is not None and decode is None:
        yield error("prefill.speculative_config", "decode needs the same draft: its KV travels with the prompt's")
    if decode is None or not needs_prefill(decode):
        return
    if prefill is None:
        yield error(
            "decode.speculative_config",
            "vLLM moves the draft's KV with the prompt's, so prefill needs the same draft: set "
            "prefill.speculative_config (--prefill-speculative-config) to the same value, or use method ngram",
        )
        return
    for key in disagreements(prefill, decode):
        yield error(
            f"decode.speculative_config.{key}",
            f"prefill has {shown(prefill.get(key))} and decode has {shown(decode.get(key))}; "
            "the draft's KV fits only if both are the same",
        )
