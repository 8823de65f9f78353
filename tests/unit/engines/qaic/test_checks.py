"""What Cloud AI does not support is said before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engines.qaic.adapter import QaicAdapter
from disagg.engines.qaic.checks import DRY_RUN_ONLY
from disagg.errors import Problem
from disagg.topology.instances import plan_instances
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import pair

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
DRAFT = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}


def qaic(**fields: Any) -> Topology:
    prefill = {"device_groups": ["0..3"]} | fields.pop("prefill", {})
    decode = {"device_groups": ["4..7"]} | fields.pop("decode", {})
    return pair(Platform.QAIC, prefill=prefill, decode=decode, **fields)


def check(topology: Topology) -> tuple[list[Problem], list[Problem]]:
    errors, warnings = QaicAdapter().check(topology, plan_instances(topology))
    return errors, [w for w in warnings if w.message != DRY_RUN_ONLY]


def test_a_plain_pair_has_nothing_to_complain_about() -> None:
    """Apart from the one sentence about how this platform is tested."""
    assert check(qaic()) == ([], [])


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"kv_store": {"url": "redis://h:1"}}, "kv_store", "not served"),
        ({"router": {"decode_policy": "kv-affinity"}}, "router.decode_policy", "no KV events"),
        ({"link": {"transport": "nixl"}}, "link.transport", "shared memory"),
        ({"link": {"handoff_store_mb": 1, "handoff_store_entries": 1}}, "link.handoff_store_entries", "one size"),
        ({"kv_cache_dtype": "bf16"}, "kv_cache_dtype", "no KV format"),
        ({"decode": {"parallel": {"pipeline": 2}}}, "decode.parallel.pipeline", "stages"),
        ({"decode": {"parallel": {"tensor": 8}}}, "decode.parallel.tensor", "4 devices"),
        ({"decode": {"device_groups": ["4..23"]}}, "decode.device_groups", "16 are the most"),
        ({"env": {"HF_TOKEN": "x"}}, "env.HF_TOKEN", "export it"),
        ({"env": {"QAIC_VISIBLE_DEVICES": "1"}}, "env.QAIC_VISIBLE_DEVICES", "device_groups"),
        ({"decode": {"override_qaic_config": {"num_cores": "x"}}}, "decode.override_qaic_config", "whole number"),
        ({"decode": {"override_qaic_config": {"device_id": 9}}}, "decode.override_qaic_config", "4..7"),
        ({"decode": {"override_qaic_config": {"prefill_only": True}}}, "decode.override_qaic_config", "kv_consumer"),
        ({"prefill": {"override_qaic_config": {"prefill_only": 0}}}, "prefill.override_qaic_config", "kv_producer"),
        ({"prefill": {"override_qaic_config": "aic_include_sampler"}}, "prefill.override_qaic_config", "decode only"),
        ({"prefill": {"max_num_seqs": 2}}, "prefill.max_num_seqs", "stages:2"),
        ({"decode": {"override_qaic_config": {"ccl_enabled": True}}}, "decode.override_qaic_config", "explicit"),
        ({"engine_args": {"enforce-eager": True}}, "engine_args.enforce-eager", "ahead of time"),
        ({"engine_args": {"enable-lora": True}}, "engine_args.enable-lora", "LoRA"),
        (
            {"decode": {"engine_args": {"enable-prefix-caching": True}}},
            "decode.engine_args.enable-prefix-caching",
            "off",
        ),
        ({"engine_args": {"kv-transfer-config": {}}}, "engine_args.kv-transfer-config", "kv_both"),
        ({"engine_args": {"additional-config": {}}}, "engine_args.additional-config", "override_qaic_config"),
        ({"prefill": {"kv_cache_dtype": "mxint8"}}, "kv_cache_dtype", "both need the same"),
        ({"decode": {"override_qaic_config": {"mxint8": True}}}, "kv_cache_dtype", "both need the same"),
        ({"decode": {"block_size": 32}}, "decode.block_size", "both need the same"),
        ({"prefill": {"speculative_config": NGRAM}}, "prefill.speculative_config", "wholly on decode"),
        ({"decode": {"override_qaic_config": {"num_cores": 17}}}, "decode.device_groups", "asked for 17"),
    ],
)
def test_what_cannot_work_is_an_error_at_its_place(fields: dict[str, Any], where: str, words: str) -> None:
    """The problem names the field and says what to do."""
    pool = fields.get("prefill")
    if isinstance(pool, dict) and pool.get("override_qaic_config") == "aic_include_sampler":
        pool["override_qaic_config"] = {"aic_include_sampler": True}
    found = check(qaic(**fields))[0]
    assert [p.where for p in found if words in p.message][:1] == [where], found


def test_equal_kv_formats_in_other_words_pass() -> None:
    """fp8, mxint8 and the compile switch are one format here."""
    topology = qaic(prefill={"kv_cache_dtype": "fp8"}, decode={"override_qaic_config": {"mxint8_en": 1}})
    assert check(topology)[0] == []


def test_a_prefill_batch_with_enough_stages_passes() -> None:
    """The pipeline holds one sequence per stage."""
    assert check(qaic(prefill={"max_num_seqs": 2, "override_qaic_config": {"stages": 2}}))[0] == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle", "model": "x", "num_speculative_tokens": 2}, "refused"),
        ({"method": "turbo", "num_speculative_tokens": 2}, "refused"),
        ({"num_speculative_tokens": 2}, "speculative_model"),
        ({"method": "ngram"}, "num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "draft's name"),
        ({**NGRAM, "draft_override_qaic_config": {"num_cores": 6}}, "this method has none"),
        ({**DRAFT, "draft_override_qaic_config": {"num_cores": "few"}}, "whole number"),
    ],
)
def test_faulty_speculative_settings_are_told(config: dict[str, Any], words: str) -> None:
    """Each fault in words."""
    found = check(qaic(decode={"speculative_config": config}))[0]
    assert any(words in p.message and p.where.startswith("decode.speculative_config") for p in found), found


def test_n_gram_does_not_mix_with_compiled_context_lengths_but_a_draft_does() -> None:
    """The compiled shapes are for a fixed number of proposed tokens."""
    override = {"comp_ctx_lengths_decode": [1024]}
    assert check(qaic(decode={"speculative_config": NGRAM, "override_qaic_config": override}))[0] != []
    assert check(qaic(decode={"speculative_config": DRAFT, "override_qaic_config": override}))[0] == []


@pytest.mark.parametrize(
    ("target", "draft", "fits"),
    [(None, None, True), (10, 6, True), (12, 6, False), (10, None, False), (None, 6, True)],
)
def test_target_and_draft_share_the_cores_of_a_device(target: int | None, draft: int | None, fits: bool) -> None:
    """Half each by default; explicit numbers win, and their sum is at most what a QID has."""
    override = {} if target is None else {"num_cores": target}
    config = DRAFT if draft is None else {**DRAFT, "draft_override_qaic_config": {"num_cores": draft}}
    found = check(qaic(decode={"speculative_config": config, "override_qaic_config": override}))[0]
    assert (found == []) is fits, found
    if not fits:
        assert "16 cores" in found[0].message


def test_two_stages_may_share_a_device_by_cores() -> None:
    """Tests of the platform run prefill and decode on one device by eight cores each."""
    half = {"device_groups": ["0"], "override_qaic_config": {"num_cores": 8}}
    assert check(qaic(prefill=half, decode=half))[0] == []
    whole = {"device_groups": ["0"]}
    found = check(qaic(prefill=whole, decode=whole))[0]
    assert len(found) == 1
    assert "QID 0" in found[0].message


def test_a_draft_on_another_stages_device_is_accepted_and_told() -> None:
    """Qualcomm's own example has one; whether it was meant cannot be known."""
    config = {**DRAFT, "draft_override_qaic_config": {"device_group": [0], "num_cores": 6}}
    errors, warnings = check(qaic(decode={"speculative_config": config, "override_qaic_config": {"num_cores": 10}}))
    assert errors == []
    assert len(warnings) == 1
    assert warnings[0].where == "decode.speculative_config"
    assert "prefill-0 owns" in warnings[0].message
    assert "22 of 16" in warnings[0].message
