"""What a Cloud AI machine would start, from the public documents."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from disagg.engines.base import PlannedProcess
from disagg.engines.qaic.adapter import QaicAdapter
from disagg.topology.instances import plan_instances
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import CONTEXT, instance, pair, value_of


def qaic(**fields: Any) -> Topology:
    prefill = {"device_groups": ["0..3"]} | fields.pop("prefill", {})
    decode = {"device_groups": ["4..7"]} | fields.pop("decode", {})
    return pair(Platform.QAIC, prefill=prefill, decode=decode, **fields)


def process(topology: Topology, name: str = "prefill-0") -> PlannedProcess:
    return QaicAdapter().process(topology, instance(topology, name), CONTEXT)


def additional(topology: Topology, name: str = "prefill-0") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(process(topology, name).argv, "--additional-config"))
    return parsed


def test_a_worker_is_a_vllm_server_on_its_devices() -> None:
    """Devices are given twice, by visibility and by name: ids are absolute QIDs."""
    planned = process(qaic(max_model_len=2048, kv_cache_dtype="fp8", quantization="mxfp6"))
    assert planned.argv[:4] == (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
    assert planned.env["QAIC_VISIBLE_DEVICES"] == "0,1,2,3"
    assert planned.devices == "QID 0..3"
    assert planned.ports == {"http": 9900}
    assert value_of(planned.argv, "--kv-cache-dtype") == "mxint8"
    assert value_of(planned.argv, "--quantization") == "mxfp6"
    assert value_of(planned.argv, "--max-model-len") == "2048"
    assert additional(qaic())["override_qaic_config"]["device_group"] == [0, 1, 2, 3]


def test_each_role_compiles_its_half_and_knows_its_partner() -> None:
    """Producer and consumer, in one numbering, meet at the hand-off service; prefix caching is off."""
    topology = qaic(prefill={"device_groups": ["0,1", "2,3"]}, link={"handoff_port": 5777})
    expected = {"prefill-0": ("kv_producer", 0), "prefill-1": ("kv_producer", 1), "decode-0": ("kv_consumer", 2)}
    for name, (role, rank) in expected.items():
        planned = process(topology, name)
        assert json.loads(value_of(planned.argv, "--kv-transfer-config")) == {
            "kv_connector": "QaicConnector",
            "kv_role": role,
            "kv_rank": rank,
            "kv_ip": "127.0.0.1",
            "kv_port": 5777,
        }
        assert additional(topology, name)["override_qaic_config"]["prefill_only"] is (role == "kv_producer")
        assert "--no-enable-prefix-caching" in planned.argv
        assert planned.depends_on == ("kv-handoff",)


def test_the_hand_off_service_comes_with_a_pair_and_reserves_its_port() -> None:
    """It has to be up before a worker starts, and nothing else may take its port."""
    topology = qaic(link={"handoff_store_mb": 768})
    (service,) = QaicAdapter().services(topology, plan_instances(topology))
    assert service.name == "kv-handoff"
    assert service.argv[1:] == ("-P", "-m", "qaic_disagg.kv_handoff.server", "--port", "5656", "--size", "768")
    assert service.ports == {"handoff": 5656}


def test_the_stores_size_is_never_invented() -> None:
    """Its unit is not documented, so an unset size stays the service's own and is told."""
    topology = qaic()
    (service,) = QaicAdapter().services(topology, plan_instances(topology))
    assert "--size" not in service.argv
    assert any("default" in note for note in service.notes)


def test_a_colocated_stage_compiles_both_halves_and_needs_no_service() -> None:
    """The baseline has no partner."""
    topology = pair(Platform.QAIC, prefill=None, decode=None, colocated={"device_groups": ["0"]})
    planned = process(topology, "colocated-0")
    assert "--kv-transfer-config" not in planned.argv
    assert planned.depends_on == ()
    assert "prefill_only" not in additional(topology, "colocated-0")["override_qaic_config"]
    assert QaicAdapter().services(topology, plan_instances(topology)) == ()


@pytest.mark.parametrize(
    "speculation",
    [
        {"speculative_model": "draft", "num_speculative_tokens": 3},
        {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3},
    ],
)
def test_both_spellings_of_a_draft_become_one(speculation: dict[str, Any]) -> None:
    """The draft's compile settings travel apart from the speculative ones, which would drop them."""
    config = {**speculation, "draft_override_qaic_config": {"num_cores": 6}}
    topology = qaic(decode={"speculative_config": config, "override_qaic_config": {"num_cores": 10}})
    words = process(topology, "decode-0").argv
    assert json.loads(value_of(words, "--speculative-config")) == {
        "method": "draft_model",
        "model": "draft",
        "num_speculative_tokens": 3,
    }
    assert additional(topology, "decode-0") == {
        "override_qaic_config": {
            "num_cores": 10,
            "prefill_only": False,
            "device_group": [4, 5, 6, 7],
            "num_devices": 4,
        },
        "draft_override_qaic_config": {"num_cores": 6, "device_group": [4, 5, 6, 7], "num_devices": 4},
    }


def test_the_platforms_limits_of_testing_are_said_on_every_process() -> None:
    """Nobody ran this on a card; a user must not believe otherwise."""
    topology = qaic()
    for planned in (*QaicAdapter().services(topology, ()), process(topology), process(topology, "decode-0")):
        assert any("dry run only" in note for note in planned.notes)
    assert any("dry run only" in p.message for p in QaicAdapter().check(topology, plan_instances(topology))[1])


def test_an_encoder_is_rendered_as_a_pooling_engine() -> None:
    """It makes embeddings, no tokens, and takes no part in the KV handoff."""
    topology = qaic(encode={"device_groups": ["8"]})
    planned = process(topology, "encode-0")
    assert value_of(planned.argv, "--runner") == "pooling"
    assert "--kv-transfer-config" not in planned.argv
