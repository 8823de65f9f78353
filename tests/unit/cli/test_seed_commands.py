"""The launch commands that Qualcomm's users know, word for word."""

from __future__ import annotations

import shlex

from disagg.cli.flags import build_topology
from disagg.engines.registry import adapter_for
from disagg.topology.instances import plan_instances, shape_name
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform, Pool, Topology
from tests.unit.cli.flag_tables import TABLES

DISAGGREGATED = """
  --model "meta-llama/Llama-3.2-1B-Instruct" \\
  --prefill-port 9900 \\
  --prefill-device-group 0..15 \\
  --decode-port 9800 \\
  --decode-device-group 16..23 \\
  --port 8000 \\
  --prefill-max-num-seqs 1 \\
  --decode-max-num-seqs 1 \\
  --prefill-max-seq-len-to-capture 256 \\
  --decode-max-seq-len-to-capture 256 \\
  --max-model-len 11264 \\
  --prefill-override-qaic-config "split_retained_state_io:True mxfp6_matmul:True" \\
  --decode-override-qaic-config "split_retained_state_io:True mxfp6_matmul:True" \\
  --generation-config vllm \\
  --kv-cache-dtype mxint8 -v -v -v
"""
DRAFT = """
  --model "meta-llama/Llama-3.1-8B-Instruct" \\
  --prefill-port 9900 \\
  --prefill-device-group 0..15 \\
  --decode-port 9800 \\
  --decode-device-group 16..23 \\
  --port 8000 \\
  --prefill-max-num-seqs 1 \\
  --decode-max-num-seqs 4 \\
  --max-model-len 2048 \\
  --prefill-override-qaic-config "mxfp6_matmul:True" \\
  --decode-override-qaic-config "mxfp6_matmul:True num_cores:10" \\
  --decode-speculative-config '{"speculative_model":"meta-llama/Llama-3.2-1B-Instruct","num_speculative_tokens":3,"draft_override_qaic_config":{"device_group":[0],"num_cores":6}}' \\
  --kv-cache-dtype mxint8 \\
  --generation-config vllm
"""  # noqa: E501
NGRAM = DRAFT[: DRAFT.index("--decode-spec")] + (
    """--decode-speculative-config '{"method":"ngram","num_speculative_tokens":5}' \\
  --kv-cache-dtype mxint8 \\
  --generation-config vllm
"""
)


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def _build(command: str) -> LoadedTopology:
    return build_topology([*_words(command), "--platform", "qaic"], flag_tables=TABLES)


def _expected(**values: object) -> Topology:
    common: dict[str, object] = {
        "platform": "qaic",
        "port": 8000,
        "kv_cache_dtype": "mxint8",
        "generation_config": "vllm",
    }
    return Topology.model_validate({**common, **values})


def test_disaggregated_serving() -> None:
    """The first command of the documentation."""
    settings = {"split_retained_state_io": True, "mxfp6_matmul": True}
    shared = {"max_num_seqs": 1, "max_seq_len_to_capture": 256, "override_qaic_config": settings}
    loaded = _build(DISAGGREGATED)
    assert loaded.topology == _expected(
        model="meta-llama/Llama-3.2-1B-Instruct",
        max_model_len=11264,
        verbosity=3,
        prefill={"ports": [9900], "device_groups": ["0..15"], **shared},
        decode={"ports": [9800], "device_groups": ["16..23"], **shared},
    )
    assert loaded.warnings == ()
    plan = plan_instances(loaded.topology)
    assert shape_name(loaded.topology, plan) == "1P1D"
    assert [(i.port, i.devices) for i in plan] == [(9900, tuple(range(16))), (9800, tuple(range(16, 24)))]


def _speculating(speculation: dict[str, object]) -> Topology:
    return _expected(
        model="meta-llama/Llama-3.1-8B-Instruct",
        max_model_len=2048,
        prefill={
            "ports": [9900],
            "device_groups": ["0..15"],
            "max_num_seqs": 1,
            "override_qaic_config": {"mxfp6_matmul": True},
        },
        decode={
            "ports": [9800],
            "device_groups": ["16..23"],
            "max_num_seqs": 4,
            "override_qaic_config": {"mxfp6_matmul": True, "num_cores": 10},
            "speculative_config": speculation,
        },
    )


def test_a_draft_model_in_the_older_spelling() -> None:
    """The settings are kept as written; the adapter translates them for its engine."""
    assert _build(DRAFT).topology == _speculating(
        {
            "speculative_model": "meta-llama/Llama-3.2-1B-Instruct",
            "num_speculative_tokens": 3,
            "draft_override_qaic_config": {"device_group": [0], "num_cores": 6},
        }
    )


def test_ngram_without_a_draft_model() -> None:
    """The newer spelling."""
    assert _build(NGRAM).topology == _speculating({"method": "ngram", "num_speculative_tokens": 5})


def test_the_real_adapter_takes_all_three_and_questions_the_draft_device() -> None:
    """Device 0 of the draft belongs to prefill: accepted, and said."""
    adapter = adapter_for(Platform.QAIC)
    tables = {Platform.QAIC: adapter.flag_table()}
    for command, questioned in ((DISAGGREGATED, False), (DRAFT, True), (NGRAM, False)):
        words = [*_words(command), "--platform", "qaic"]
        loaded = build_topology(words, flag_tables=tables, check=adapter.check)
        about = [w for w in loaded.warnings if w.where == "--decode-speculative-config" and "QID 0" in w.message]
        assert bool(about) is questioned


def test_every_stage_takes_the_flags_of_prefill_and_decode() -> None:
    """Encode's flags are not public; ours follow the same pattern."""
    words = _words(DISAGGREGATED.replace("--prefill-", "--encode-").replace("-max-seq-len-to-capture 256", "-tp 1"))
    encode = build_topology([*words, "--platform", "qaic"], flag_tables=TABLES).topology.encode
    assert encode == Pool(
        ports=(9900,),
        device_groups=("0..15",),
        max_num_seqs=1,
        override_qaic_config={"split_retained_state_io": True, "mxfp6_matmul": True},
    )
