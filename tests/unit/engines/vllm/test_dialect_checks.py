"""`disagg.engines.vllm.dialect_checks` and what follows from `link.dialect`: connector, ports, environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.engines.vllm.adapter import VllmAdapter
from disagg.topology.instances import plan_instances
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import CONTEXT, instance, pair, value_of


def problems(topology: Topology) -> tuple[set[str], set[str]]:
    errors, warnings = VllmAdapter().check(topology, plan_instances(topology))
    return {p.where for p in errors}, {p.where for p in warnings}


def on(dialect: str, platform: Platform = Platform.CUDA, **fields: Any) -> Topology:
    return pair(platform, link={"dialect": dialect}, **fields)


@pytest.mark.parametrize("dialect", ["mooncake", "lmcache"])
def test_what_needs_a_gpu_is_refused_on_cpu(dialect: str) -> None:
    """Before the start, not by an engine that dies of it."""
    assert "link.dialect" in problems(on(dialect, Platform.CPU))[0]


def test_a_dialect_of_another_engine_is_refused() -> None:
    """vLLM does not meet in SGLang's rooms."""
    assert "link.dialect" in problems(on("sglang"))[0]


@pytest.mark.parametrize("dialect", ["auto", "nixl-pull", "nixl-push"])
def test_nixl_is_fine_everywhere(dialect: str) -> None:
    """It moves KV between CPUs as well."""
    assert problems(on(dialect, Platform.CPU))[0] == set()


@pytest.mark.parametrize(
    ("dialect", "connector"),
    [
        ("auto", "NixlConnector"),
        ("nixl-push", "NixlPushConnector"),
        ("mooncake", "MooncakeConnector"),
        ("lmcache", "LMCacheConnectorV1"),
    ],
)
def test_the_connector_follows(dialect: str, connector: str) -> None:
    """Router and engines have to speak the same dialect."""
    topology = on(dialect)
    process = VllmAdapter().process(topology, instance(topology, "prefill-0"), CONTEXT)
    config = json.loads(value_of(process.argv, "--kv-transfer-config"))
    assert config["kv_connector"] == connector
    assert config["engine_id"] == CONTEXT.incarnation


def test_each_mooncake_prefill_has_a_bootstrap_port_of_its_own() -> None:
    """Planned with all others, told to the engine, and known to the router."""
    topology = on("mooncake", prefill={"replicas": 2, "device_groups": ["0", "1"]}, decode={"device_groups": ["2"]})
    adapter = VllmAdapter()
    instances = {i.name: i for i in plan_instances(topology)}
    ports = []
    for name in ("prefill-0", "prefill-1"):
        process = adapter.process(topology, instances[name], CONTEXT)
        port = process.ports["bootstrap"]
        assert process.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == str(port)
        assert adapter.peer(topology, instances[name], "x").bootstrap_port == port
        ports.append(port)
    assert ports == [8998, 8999]
    assert "bootstrap" not in adapter.process(topology, instances["decode-0"], CONTEXT).ports


def test_lmcache_wants_its_settings_and_one_receiver() -> None:
    """The file's ports are told, because the router sends prefill to them."""
    topology = on("lmcache", decode={"replicas": 2, "device_groups": ["1", "2"]})
    errors, _ = VllmAdapter().check(topology, plan_instances(topology))
    where = {p.where for p in errors}
    assert {"decode.replicas", "prefill.env.LMCACHE_CONFIG_FILE", "decode.env.LMCACHE_CONFIG_FILE"} <= where
    told = next(p.message for p in errors if p.where.startswith("decode.env"))
    peer = VllmAdapter().peer(topology, instance(topology, "decode-0"), "x")
    assert f"pd_peer_init_port {peer.side_channel_port}" in told
    assert f"pd_peer_alloc_port {peer.alloc_port}" in told
