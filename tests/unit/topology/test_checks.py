"""Do the parts fit together, without a machine."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.topology.checks import check_topology
from disagg.topology.spec import Platform
from tests.unit.topology.helpers import topology


def _errors(platform: Platform = Platform.CPU, **values: Any) -> list[str]:
    return [str(p) for p in check_topology(topology(**values), platform).errors]


@pytest.mark.parametrize(
    "pools",
    [
        {},
        {"encode": {}},
        {"encode": {}, "prefill": None},
        {"prefill": None, "decode": None, "colocated": {}},
        {"colocated": {}},
    ],
)
def test_every_mode_is_accepted(pools: dict[str, Any]) -> None:
    """xPyD, xEyPzD, xEyPD, and a colocated pool alone or as a baseline."""
    assert _errors(**pools) == []


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"prefill": None, "decode": None}, "there are no pools"),
        ({"prefill": None}, "a decode pool needs a prefill pool (xPyD) or an encode pool"),
        ({"decode": None}, "prefill without a decode pool"),
        ({"decode": None, "encode": {}}, "encode and prefill without a decode pool"),
        ({"decode": None, "prefill": None, "encode": {}}, "encode without a decode pool"),
        ({"decode": None, "prefill": None, "encode": {}, "colocated": {}}, "encode without a decode pool"),
    ],
)
def test_pools_that_make_no_deployment(pools: dict[str, Any], message: str) -> None:
    """Decode is required, and prefill or encode with it; the check says so itself."""
    findings = check_topology(topology(**pools), Platform.CPU)
    assert message in str(findings.errors[0])
    assert not findings.whole


@pytest.mark.parametrize(
    "pool",
    [
        {"device_groups": ["0", "1"], "ports": [1]},
        {"device_groups": ["0"], "replicas": 2},
        {"ports": [1, 2], "replicas": 1},
        {"device_groups": ["0"], "ports": [1], "replicas": 2},
    ],
)
def test_counts_have_to_agree(pool: dict[str, Any]) -> None:
    """Groups, ports and replicas each give the number of instances."""
    found = _errors(prefill=pool, platform=Platform.EMULATED)
    assert len(found) == 1
    assert "each prefill instance needs one of each" in found[0]


def test_the_admin_api_has_a_port_of_its_own() -> None:
    """It is told with all other problems, not when the port cannot be bound."""
    found = _errors(port=1, router={"admin_port": 1})
    assert "port, router.admin_port: port 1 is given to the endpoint and the admin API; each needs its own" in found


def test_ports_are_distinct() -> None:
    """The endpoint and all instances, of the same stage and across stages, each problem naming all its places."""
    found = _errors(port=1, prefill={"ports": [1, 2, 3, 3]}, decode={"ports": [2]})
    assert found == [
        "port, prefill.ports.0: port 1 is given to the endpoint and prefill-0; each needs its own",
        "prefill.ports.1, decode.ports.0: port 2 is given to prefill-1 and decode-0; each needs its own",
        "prefill.ports.2, prefill.ports.3: port 3 is given to prefill-2 and prefill-3; each needs its own",
    ]


def test_the_handoff_service_has_a_port_on_qaic_only() -> None:
    """Elsewhere nothing listens there."""
    assert "the KV hand-off service" in _errors(Platform.QAIC, port=5656)[0]
    assert _errors(Platform.CPU, port=5656) == []


def test_ports_can_run_out() -> None:
    """Too many instances are an error, not a port above 65535."""
    assert any("free ports" in e for e in _errors(prefill={"replicas": 60_000}))
    assert any("link.side_channel_port" in e for e in _errors(link={"side_channel_port": 65535}))


@pytest.mark.parametrize(
    ("prefill", "decode", "first", "second"),
    [
        (["0..3", "3"], ["4"], "prefill-0", "prefill-1"),
        (["0..3"], ["2,9"], "prefill-0", "decode-0"),
    ],
)
def test_a_device_belongs_to_one_instance(prefill: list[str], decode: list[str], first: str, second: str) -> None:
    """Overlaps are found inside a stage and across stages."""
    found = _errors(prefill={"device_groups": prefill}, decode={"device_groups": decode})
    assert len(found) == 1
    assert f"{first} and {second} both have CPU core" in found[0]


def _cores(prefill: str | None, decode: str | None, draft: int | None = None) -> list[str]:
    speculation = None if draft is None else {"draft_override_qaic_config": {"num_cores": draft}}
    return _errors(
        Platform.QAIC,
        prefill={"device_groups": ["0..1"], "override_qaic_config": prefill},
        decode={"device_groups": ["1..2"], "override_qaic_config": decode, "speculative_config": speculation},
    )


def test_qaic_instances_may_share_a_device_whose_cores_suffice() -> None:
    """8 and 8 of 16 cores fit; a draft model's cores count; without numbers nobody can tell."""
    assert _cores("num_cores:8", "num_cores:8") == []
    assert _cores("aic-num-cores=8", "Num_Cores:4", 4) == []
    assert "QID 1 would need prefill-0 8 + decode-0 9 cores, and has 16" in _cores("num_cores:8", "num_cores:9")[0]
    assert "decode-0 14 cores" in _cores("num_cores:8", "num_cores:8", 6)[0]
    assert "unless num_cores" in _cores("num_cores:8", None)[0]
    assert "unless num_cores" in _cores(None, None)[0]
    assert "unless num_cores" in _cores("num_cores:8", "num_cores:x")[0]


def test_three_instances_on_one_device_are_summed() -> None:
    """Each pair would fit, all three do not."""
    found = _errors(
        Platform.QAIC,
        override_qaic_config="num_cores:6",
        prefill={"device_groups": ["0", "0"]},
        decode={"device_groups": ["0"]},
    )
    assert len(found) == 1
    assert "prefill-0 6 + prefill-1 6 + decode-0 6 cores" in found[0]


def test_cores_are_not_shared_off_qaic_or_with_a_colocated_pool() -> None:
    """num_cores means nothing on other platforms, and a baseline must not be disturbed."""
    pools = {"prefill": {"device_groups": ["0"]}, "override_qaic_config": "num_cores:4"}
    assert _errors(Platform.CPU, **pools, decode={"device_groups": ["0"]})
    shared = _errors(Platform.QAIC, **pools, decode={"device_groups": ["1"]}, colocated={"device_groups": ["0"]})
    assert len(shared) == 1
    assert "prefill-0 and colocated-0 both have QID 0" in shared[0]


@pytest.mark.parametrize(
    ("platform", "group", "parallel", "fits"),
    [
        (Platform.CUDA, "0..3", {"tensor": 4}, True),
        (Platform.CUDA, "0..3", {"tensor": 2, "data": 2}, True),
        (Platform.CUDA, "0..3", {}, False),
        (Platform.ROCM, "0", {"tensor": 2}, False),
        (Platform.CPU, "0..3", {}, True),
        (Platform.CPU, "0..3", {"tensor": 2}, True),
        (Platform.CPU, "0", {"pipeline": 2}, False),
        (Platform.QAIC, "0..15", {}, True),
        (Platform.QAIC, "0..2", {"tensor": 2}, False),
        (Platform.EMULATED, "0", {"tensor": 8}, True),
    ],
)
def test_a_group_fits_the_parallel_shape(
    platform: Platform, group: str, parallel: dict[str, int], fits: bool
) -> None:
    """What a group must have depends on what its ids are."""
    pools = {"prefill": {"device_groups": [group], "parallel": parallel}, "decode": {"device_groups": ["99"]}}
    found = _errors(platform, **pools)
    assert (found == []) is fits
    assert all("prefill-0 has" in e for e in found)


def test_groups_are_given_for_all_pools_or_none() -> None:
    """An instance without a group would take devices that another one owns."""
    found = _errors(prefill={"device_groups": ["0"]})
    assert len(found) == 1
    assert "give --decode-device-group, or none anywhere" in found[0]
    assert _errors(Platform.EMULATED, prefill={"device_groups": ["0"]}) == []


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"kv_cache_dtype": "fp8"}, True),
        ({"prefill": {"kv_cache_dtype": "fp8"}}, False),
        ({"prefill": {"kv_cache_dtype": "auto"}}, True),
        ({"prefill": {"kv_cache_dtype": "fp8"}, "decode": {"kv_cache_dtype": "fp8_e4m3"}}, True),
        ({"prefill": {"kv_cache_dtype": "bf16"}, "decode": {"kv_cache_dtype": "bfloat16"}}, True),
        ({"prefill": {"kv_cache_dtype": "fp8"}, "decode": {"kv_cache_dtype": "fp8_e5m2"}}, False),
        ({"kv_cache_dtype": "fp8", "decode": {"kv_cache_dtype": "bf16"}}, False),
        ({"block_size": 16}, True),
        ({"prefill": {"block_size": 16}}, False),
        ({"block_size": 16, "decode": {"block_size": 32}}, False),
        ({"block_size": 16, "decode": {"block_size": 16}}, True),
        ({"prefill": None, "encode": {}, "decode": {"block_size": 16}}, True),
    ],
)
def test_prefill_and_decode_share_their_kv_layout(values: dict[str, Any], fits: bool) -> None:
    """A different format or block size ends in wrong words with status 200, so it must not start."""
    found = _errors(**values)
    assert (found == []) is fits
    assert all("prefill and decode need the same KV" in e and "set it once for both" in e for e in found)


def test_qaic_names_of_kv_formats_are_equal() -> None:
    """fp8 is stored as mxint8 there, and auto as fp16."""
    pair = {"prefill": {"kv_cache_dtype": "fp8"}, "decode": {"kv_cache_dtype": "mxint8"}}
    assert _errors(Platform.QAIC, **pair) == []
    assert _errors(Platform.QAIC, prefill={"kv_cache_dtype": "fp16"}) == []


@pytest.mark.parametrize("platform", [Platform.CPU, Platform.CUDA, Platform.ROCM])
def test_mxint8_is_a_format_of_qaic(platform: Platform) -> None:
    """Said once, at the place where it was given."""
    found = _errors(platform, kv_cache_dtype="mxint8")
    assert len(found) == 1
    assert found[0].startswith(f"kv_cache_dtype: mxint8 is a format of Qualcomm Cloud AI and unknown on {platform}")
    assert _errors(Platform.QAIC, kv_cache_dtype="mxint8") == []
    assert _errors(Platform.EMULATED, kv_cache_dtype="mxint8") == []
    assert "is not a KV format of Qualcomm" in _errors(Platform.QAIC, kv_cache_dtype="fp8_e5m2")[0]


def test_different_context_limits_are_a_warning() -> None:
    """Nothing breaks, but requests above the smaller one are refused."""
    findings = check_topology(topology(max_model_len=4096, decode={"max_model_len": 1024}), Platform.CPU)
    assert findings.errors == ()
    assert [str(w) for w in findings.warnings] == [
        "max_model_len, decode.max_model_len: prefill takes 4096 tokens and decode takes 1024 tokens; "
        "the endpoint takes the smaller, 1024"
    ]
    assert check_topology(topology(decode={"max_model_len": 1024}), Platform.CPU).warnings == ()
    assert check_topology(topology(max_model_len=1024), Platform.CPU).warnings == ()


def test_speculation_is_not_for_prefill_on_qaic_nor_for_encode() -> None:
    """On other platforms prefill may need the draft's KV; an encoder never generates."""
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    assert "give --decode-speculative-config" in _errors(Platform.QAIC, prefill={"speculative_config": ngram})[0]
    assert _errors(Platform.CPU, prefill={"speculative_config": ngram}) == []
    assert "an encoder generates no tokens" in _errors(encode={"speculative_config": ngram})[0]


def test_fields_about_kv_have_no_meaning_for_encode() -> None:
    """A value that does nothing is a misunderstanding; a shared value is fine."""
    found = _errors(encode={"kv_cache_dtype": "fp8", "block_size": 16, "max_seq_len_to_capture": 4})
    assert [e.partition(":")[0] for e in found] == [
        "encode.kv_cache_dtype",
        "encode.block_size",
        "encode.max_seq_len_to_capture",
    ]
    assert _errors(encode={}, block_size=16) == []


def test_the_handoff_store_has_one_size() -> None:
    """MB and entries cannot both be meant."""
    assert "give MB or entries" in _errors(link={"handoff_store_mb": 1, "handoff_store_entries": 1})[0]
    assert _errors(link={"handoff_store_mb": 1}) == []


def test_a_served_name_is_given_once() -> None:
    """A repeated name is a slip of the pen."""
    assert _errors(served_model_name=["a", "b", "a"]) == ["served_model_name: 'a' is given twice"]
