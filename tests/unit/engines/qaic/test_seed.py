"""The three launches that Qualcomm documents, from their own words to the processes."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from disagg.cli.flags import build_topology
from disagg.engines.base import PlannedProcess
from disagg.engines.qaic.adapter import QaicAdapter
from disagg.topology.instances import plan_instances
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform
from tests.support.engine_cases import CONTEXT, value_of

BASE = """--model meta-llama/Llama-3.2-1B-Instruct --prefill-port 9900 --prefill-device-group 0..15 --decode-port 9800
--decode-device-group 16..23 --port 8000 --prefill-max-num-seqs 1 --decode-max-num-seqs 1
--prefill-max-seq-len-to-capture 256 --decode-max-seq-len-to-capture 256 --max-model-len 11264
--prefill-override-qaic-config "split_retained_state_io:True mxfp6_matmul:True"
--decode-override-qaic-config "split_retained_state_io:True mxfp6_matmul:True"
--generation-config vllm --kv-cache-dtype mxint8 -v -v -v"""
DRAFT = """--model meta-llama/Llama-3.1-8B-Instruct --prefill-port 9900 --prefill-device-group 0..15
--decode-port 9800 --decode-device-group 16..23 --port 8000 --prefill-max-num-seqs 1 --decode-max-num-seqs 4
--max-model-len 2048 --prefill-override-qaic-config "mxfp6_matmul:True"
--decode-override-qaic-config "mxfp6_matmul:True num_cores:10"
--decode-speculative-config '{"speculative_model":"meta-llama/Llama-3.2-1B-Instruct","num_speculative_tokens":3,
"draft_override_qaic_config":{"device_group":[0],"num_cores":6}}' --kv-cache-dtype mxint8 --generation-config vllm"""
NGRAM = BASE + """ --decode-speculative-config '{"method":"ngram","num_speculative_tokens":5}'"""


def load(words: str) -> LoadedTopology:
    adapter = QaicAdapter()
    return build_topology(
        ["--platform", "qaic", *shlex.split(words)],
        flag_tables={Platform.QAIC: adapter.flag_table()},
        check=adapter.check,
    )


def processes(loaded: LoadedTopology) -> dict[str, PlannedProcess]:
    adapter, topology = QaicAdapter(), loaded.resolved()
    instances = plan_instances(topology)
    planned = [*adapter.services(topology, instances), *(adapter.process(topology, i, CONTEXT) for i in instances)]
    return {p.name: p for p in planned}


def additional(process: PlannedProcess) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(process.argv, "--additional-config"))
    return parsed


def test_the_first_launch_gives_two_workers_and_their_meeting_place() -> None:
    """Every flag of the document reaches the worker that it is for."""
    planned = processes(load(BASE))
    assert list(planned) == ["kv-handoff", "prefill-0", "decode-0"]
    prefill, decode = planned["prefill-0"], planned["decode-0"]
    assert (prefill.ports["http"], decode.ports["http"]) == (9900, 9800)
    assert prefill.env["QAIC_VISIBLE_DEVICES"] == ",".join(map(str, range(16)))
    assert decode.env["QAIC_VISIBLE_DEVICES"] == "16,17,18,19,20,21,22,23"
    for process in (prefill, decode):
        assert value_of(process.argv, "--max-model-len") == "11264"
        assert value_of(process.argv, "--max-num-seqs") == "1"
        assert value_of(process.argv, "--long-prefill-token-threshold") == "256"
        assert value_of(process.argv, "--kv-cache-dtype") == "mxint8"
        assert value_of(process.argv, "--generation-config") == "vllm"
        assert process.env["VLLM_LOGGING_LEVEL"] == "DEBUG"
        override = additional(process)["override_qaic_config"]
        assert override["split_retained_state_io"] is True
        assert override["mxfp6_matmul"] is True
    assert additional(prefill)["override_qaic_config"]["prefill_only"] is True
    assert additional(decode)["override_qaic_config"]["prefill_only"] is False


def test_the_draft_launch_splits_the_settings_and_warns_of_its_device() -> None:
    """The draft's device 0 belongs to prefill; the old spelling is read and told."""
    loaded = load(DRAFT)
    messages = [str(w) for w in loaded.warnings]
    assert any("prefill-0 owns" in m for m in messages), messages
    assert any("speculative_model" in m for m in messages), messages
    decode = processes(loaded)["decode-0"]
    assert json.loads(value_of(decode.argv, "--speculative-config")) == {
        "method": "draft_model",
        "model": "meta-llama/Llama-3.2-1B-Instruct",
        "num_speculative_tokens": 3,
    }
    config = additional(decode)
    assert config["override_qaic_config"]["num_cores"] == 10
    assert config["draft_override_qaic_config"] == {"device_group": [0], "num_cores": 6, "num_devices": 1}
    assert decode.env["QAIC_VISIBLE_DEVICES"] == "16,17,18,19,20,21,22,23,0"


def test_the_n_gram_launch_speculates_on_decode_alone() -> None:
    """No draft, no second binary, and prefill knows nothing of it."""
    planned = processes(load(NGRAM))
    assert json.loads(value_of(planned["decode-0"].argv, "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
    }
    assert "draft_override_qaic_config" not in additional(planned["decode-0"])
    assert "--speculative-config" not in planned["prefill-0"].argv


@pytest.mark.parametrize("words", [BASE, DRAFT, NGRAM])
def test_each_launch_says_that_it_was_never_run_on_a_card(words: str) -> None:
    """What a dry run prints must not be taken for more."""
    assert any("dry run only" in str(w) for w in load(words).warnings)
