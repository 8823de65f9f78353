"""vLLM's command line, from the typed fields of a topology and the user's own flags."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from disagg.engines.base import FlagSpec
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.engines.vllm.command import flag_words
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import CONTEXT, instance, pair, value_of


def argv(topology: Topology, name: str = "prefill-0") -> tuple[str, ...]:
    return VllmAdapter().process(topology, instance(topology, name), CONTEXT).argv


def transfer(topology: Topology, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(argv(topology, name), "--kv-transfer-config"))
    return parsed


def test_the_server_module_is_run_with_this_interpreter() -> None:
    """The package's console script does not start in its CPU build."""
    words = argv(pair())
    assert words[:4] == (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
    assert value_of(words, "--model") == "/models/tiny"
    at = words.index("--served-model-name")
    assert words[at + 1 : at + 3] == ("tiny", "tiny-alias")
    assert value_of(words, "--host") == "127.0.0.1"
    assert value_of(words, "--port") == "9900"


def test_typed_fields_become_flags_of_their_stage() -> None:
    """Each field of the topology reaches the engine under vLLM's name for it."""
    topology = pair(
        Platform.CUDA,
        max_model_len=4096,
        generation_config="vllm",
        seed=7,
        kv_cache_dtype="bf16",
        block_size=64,
        quantization="fp8",
        prefill={"max_num_seqs": 4, "max_num_batched_tokens": 8192, "max_seq_len_to_capture": 256},
    )
    words = argv(topology)
    assert value_of(words, "--max-model-len") == "4096"
    assert value_of(words, "--max-num-seqs") == "4"
    assert value_of(words, "--max-num-batched-tokens") == "8192"
    assert value_of(words, "--long-prefill-token-threshold") == "256"
    assert value_of(words, "--kv-cache-dtype") == "bfloat16"
    assert value_of(words, "--block-size") == "64"
    assert value_of(words, "--quantization") == "fp8"
    assert value_of(words, "--generation-config") == "vllm"
    assert value_of(words, "--seed") == "7"
    decode = argv(topology, "decode-0")
    assert "--max-num-seqs" not in decode
    assert value_of(decode, "--block-size") == "64"


def test_what_is_not_set_is_left_to_the_engine() -> None:
    """No number is invented: an unset field has no flag."""
    words = argv(pair(Platform.CUDA))
    for flag in ("--max-model-len", "--max-num-seqs", "--block-size", "--kv-cache-dtype", "--seed", "--dtype"):
        assert flag not in words


def test_the_old_capture_length_comes_with_a_note() -> None:
    """The name meant CUDA graphs once; a user must see what it does now."""
    topology = pair(prefill={"max_seq_len_to_capture": 256})
    notes = VllmAdapter().process(topology, instance(topology, "prefill-0"), CONTEXT).notes
    assert any("--long-prefill-token-threshold" in note for note in notes)


def test_the_parallel_shape_becomes_flags() -> None:
    """Sizes of one are vLLM's default and are left out."""
    shape = {"tensor": 2, "pipeline": 2, "data": 2, "expert": 4}
    words = argv(pair(Platform.CUDA, prefill={"device_groups": ["0..7"], "parallel": shape}))
    assert value_of(words, "--tensor-parallel-size") == "2"
    assert value_of(words, "--pipeline-parallel-size") == "2"
    assert value_of(words, "--data-parallel-size") == "2"
    assert "--enable-expert-parallel" in words
    assert "--tensor-parallel-size" not in argv(pair(Platform.CUDA))


@pytest.mark.parametrize(("name", "role"), [("prefill-0", "kv_producer"), ("decode-0", "kv_consumer")])
def test_a_pair_hands_kv_over_with_nixl(name: str, role: str) -> None:
    """Roles are told apart, the incarnation is the engine's identity, and failure and lease follow the link."""
    config = transfer(pair(link={"on_failure": "fail", "lease_s": 45}), name)
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "engine_id": CONTEXT.incarnation,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 45},
        "kv_buffer_device": "cpu",
    }


def test_on_accelerators_the_engine_chooses_its_buffer() -> None:
    """The KV leaves the device directly, without a copy in host memory."""
    assert "kv_buffer_device" not in transfer(pair(Platform.CUDA), "prefill-0")


@pytest.mark.parametrize(
    "pools",
    [
        {"prefill": None, "decode": None, "colocated": {}},
        {"prefill": None, "decode": {}},
    ],
)
def test_without_a_partner_there_is_no_handoff(pools: dict[str, Any]) -> None:
    """An instance that does both halves must not wait for KV, nor bind a side channel."""
    topology = pair(**pools)
    name = "colocated-0" if topology.colocated is not None else "decode-0"
    process = VllmAdapter().process(topology, instance(topology, name), CONTEXT)
    assert "--kv-transfer-config" not in process.argv
    assert set(process.ports) == {"http"}
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in process.env


def test_only_the_stage_whose_policy_listens_publishes_kv_events() -> None:
    """Into the private directory of this start: prompts are not for the network, nor for other users."""
    topology = pair(router={"decode_policy": "kv-affinity"})
    assert "--kv-events-config" not in argv(topology)
    config = json.loads(value_of(argv(topology, "decode-0"), "--kv-events-config"))
    assert config["enable_kv_cache_events"] is True
    for key in ("endpoint", "replay_endpoint"):
        # The engine binds such a name, and counts its data-parallel ranks up only where it has this word.
        assert config[key].startswith("ipc:///run/disagg/prefill-0/inproc")
    assert config["endpoint"] != config["replay_endpoint"]


def test_a_users_own_events_configuration_wins() -> None:
    """The router asks the engine where it publishes."""
    own = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7777"}
    topology = pair(router={"prefill_policy": "kv-affinity"}, prefill={"engine_args": {"kv-events-config": own}})
    assert json.loads(value_of(argv(topology), "--kv-events-config")) == own


def test_the_users_flags_win_and_stand_once() -> None:
    """A flag of one stage replaces a default of ours and a flag of all stages."""
    topology = pair(
        engine_args={"max-logprobs": 5}, prefill={"engine_args": {"max_logprobs": 20, "enforce-eager": False}}
    )
    words = argv(topology)
    assert value_of(words, "--max-logprobs") == "20"
    assert "--no-enforce-eager" in words
    assert "--enforce-eager" not in words
    assert "--enforce-eager" in argv(topology, "decode-0")


def test_only_the_cpu_skips_compilation_by_default() -> None:
    """Compiling pays on an accelerator; a user's compilation settings are never overruled."""
    assert "--enforce-eager" in argv(pair())
    assert "--enforce-eager" not in argv(pair(Platform.CUDA))
    assert "--enforce-eager" not in argv(pair(engine_args={"compilation-config": {"mode": 3}}))


def test_an_engine_of_one_rank_on_cpu_runs_without_a_worker_process() -> None:
    """It starts a third faster and polls no queue; both the flag and the variable are needed, or neither."""
    topology = pair(prefill={"device_groups": ["0,1"], "parallel": {"tensor": 2}})
    decode = VllmAdapter().process(topology, instance(topology, "decode-0"), CONTEXT)
    assert value_of(decode.argv, "--distributed-executor-backend") == "uni"
    assert decode.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    prefill = VllmAdapter().process(topology, instance(topology, "prefill-0"), CONTEXT)
    assert "--distributed-executor-backend" not in prefill.argv
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in prefill.env
    own = pair(engine_args={"distributed-executor-backend": "mp"})
    chosen = VllmAdapter().process(own, instance(own, "decode-0"), CONTEXT)
    assert value_of(chosen.argv, "--distributed-executor-backend") == "mp"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in chosen.env
    assert "--distributed-executor-backend" not in argv(pair(Platform.CUDA))


@pytest.mark.parametrize(
    ("value", "spec", "words"),
    [
        (True, FlagSpec("bool"), ["--x"]),
        (False, FlagSpec("bool"), ["--no-x"]),
        ({"a": [1, "ü"]}, FlagSpec("json"), ["--x", '{"a":[1,"ü"]}']),
        ([1, 2], FlagSpec("json"), ["--x", "[1,2]"]),
        ([1, "b"], FlagSpec("list"), ["--x", "1", "b"]),
        ([1, 2], None, ["--x", "1", "2"]),
        (True, None, ["--x"]),
        ("16k", FlagSpec("str"), ["--x", "16k"]),
        (0.5, FlagSpec("float"), ["--x", "0.5"]),
    ],
)
def test_a_value_is_written_as_its_flag_takes_it(value: Any, spec: FlagSpec | None, words: list[str]) -> None:
    """Booleans by their twin, mappings as JSON, lists as several words."""
    assert flag_words("x", value, spec) == words


def test_speculative_settings_reach_the_engine_in_its_own_spelling() -> None:
    """vLLM 0.32 no longer reads the old key; the translation is told."""
    old = {"speculative_model": "draft", "num_speculative_tokens": 3}
    topology = pair(prefill={"speculative_config": old}, decode={"speculative_config": old})
    process = VllmAdapter().process(topology, instance(topology, "decode-0"), CONTEXT)
    assert json.loads(value_of(process.argv, "--speculative-config")) == {
        "num_speculative_tokens": 3,
        "model": "draft",
        "method": "draft_model",
    }
    assert any("speculative_model is passed as model" in note for note in process.notes)


def test_statistics_stay_on_at_every_verbosity() -> None:
    """Readiness and routing read the engine's metrics, which the flag would empty."""
    for level in range(6):
        topology = pair(verbosity=level)
        process = VllmAdapter().process(topology, instance(topology, "decode-0"), CONTEXT)
        assert "--disable-log-stats" not in process.argv
    assert "--disable-uvicorn-access-log" in argv(pair(verbosity=0))
    assert "--enable-log-requests" in argv(pair(verbosity=3))
