"""Speculative decoding on Cloud AI: wholly on decode, with three methods."""

from __future__ import annotations

from disagg.engines.findings import Findings, error, shown, warning
from disagg.engines.qaic.stage import DRAFT_KEY, StagePlan, hands_over, is_draft_model
from disagg.engines.settings import stage_settings
from disagg.topology.spec import Stage, Topology

_METHODS = ("ngram", "suffix", "draft_model")


def findings(topology: Topology, name: Stage, stage: StagePlan) -> Findings:
    """What is wrong with a stage's speculative settings."""
    if stage.speculation is None:
        return
    where = f"{name}.speculative_config"
    if name in (Stage.PREFILL, Stage.ENCODE):
        yield error(where, "speculation runs wholly on decode; prefill has no drafter: use decode.speculative_config")
        return
    yield from _spelling(where, stage)
    yield from _method(topology, name, stage, where)
    yield from _draft(topology, name, stage, where)


def _spelling(where: str, stage: StagePlan) -> Findings:
    speculation = stage.speculation
    if speculation is None:
        return
    for pair in speculation.conflicts:
        yield error(where, f"{pair} are two spellings of one setting and differ; keep the second")
    for old, new in speculation.renamed:
        yield warning(where, f"{old} is the old spelling; the engine gets it as {new}")
    tokens = speculation.config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        yield error(
            where, f"num_speculative_tokens is {shown(tokens)}; write the number of proposed tokens, such as 3"
        )


def _method(topology: Topology, name: Stage, stage: StagePlan, where: str) -> Findings:
    config = stage.speculation.config if stage.speculation is not None else {}
    method = config.get("method")
    if method is None:
        yield error(
            where,
            'needs a method or a draft: {"method": "ngram", "num_speculative_tokens": 5}, '
            '{"method": "draft_model", "model": "<draft>", "num_speculative_tokens": 3} or the older '
            '{"speculative_model": "<draft>", "num_speculative_tokens": 3}',
        )
        return
    if method not in _METHODS:
        yield error(where, f"{shown(method)} is refused on Cloud AI; choose one of {', '.join(_METHODS)}")
        return
    if method == "draft_model" and not config.get("model"):
        yield error(where, "method draft_model needs the draft's name in model")
    if method == "suffix" and hands_over(topology):
        yield warning(
            where, "suffix with separate stages is in later tests of the platform, but in no release known here"
        )
    override = stage.override.config
    if method != "draft_model" and ("comp_ctx_lengths_decode" in override or stage.override.is_on("ccl_enabled")):
        yield error(where, f"{shown(method)} does not work with compiled context lengths; only a draft model does")
    if stage.override.is_on("aic_include_sampler"):
        yield error(where, "does not work with on-device sampling; leave aic_include_sampler out")
    if topology.encode is not None or {"height", "width", "num_patches"} & override.keys():
        yield error(where, "does not work with multimodal models")
    flags = stage_settings(topology, name).engine_args
    if flags.get("enable-lora") not in (None, False) or flags.get("lora-modules"):
        yield error(where, "does not work with LoRA")


def _draft(topology: Topology, name: Stage, stage: StagePlan, where: str) -> Findings:
    raw = (stage_settings(topology, name).speculative_config or {}).get(DRAFT_KEY)
    if raw is not None and not isinstance(raw, dict):
        yield error(f"{where}.{DRAFT_KEY}", f"{shown(raw)} is no mapping of compile settings")
    if raw is not None and not is_draft_model(stage.speculation):
        yield error(f"{where}.{DRAFT_KEY}", "only a draft model is compiled; this method has none")
    if stage.draft is None:
        return
    for message in stage.draft.override.errors:
        yield error(f"{where}.{DRAFT_KEY}", message)
    for note in stage.draft.override.notes:
        yield warning(f"{where}.{DRAFT_KEY}", note)
