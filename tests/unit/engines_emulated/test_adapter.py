"""From a topology with `platform: emulated` to processes that understand what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.engines.base import Api, Peer, StartContext, Transfer
from disagg.engines.emulated import __main__ as module
from disagg.engines.emulated.adapter import EmulatedAdapter
from disagg.engines.emulated.arguments import add_engine_arguments, engine_settings
from disagg.engines.emulated.settings import EngineSettings, Role
from disagg.engines.registry import adapter_for
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Stage, Topology

CONTEXT = StartContext("some/model", ("name", "alias"), "incarnation-1", "/run/x")


def topology(**fields: Any) -> Topology:
    base = {"model": "some/model", "platform": "emulated", "prefill": {}, "decode": {}}
    return Topology.model_validate({**base, **fields})


def instance(stage: Stage = Stage.PREFILL) -> Instance:
    return Instance("x-0", stage, 0, (3, 4), "127.0.0.1", 9900, 5601)


def started(top: Topology, stage: Stage = Stage.PREFILL) -> EngineSettings:
    """What the process makes of its command line."""
    import argparse

    process = EmulatedAdapter().process(top, instance(stage), CONTEXT)
    assert process.argv[1:4] == ("-P", "-m", "disagg.engines.emulated")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--side-channel-port", type=int)
    parser.add_argument("--engine-id")
    add_engine_arguments(parser)
    args = parser.parse_args(process.argv[4:])
    assert args.port == process.ports["http"] == 9900
    assert args.side_channel_port == process.ports.get("side-channel")
    return engine_settings(args, args.engine_id)


def test_the_platform_has_this_adapter() -> None:
    """`platform: emulated` finds it by name."""
    assert adapter_for(Platform.EMULATED).name == "emulated"


def test_every_typed_field_reaches_the_engine() -> None:
    """Limits, block size, lease, policy, names and incarnation of the topology are the engine's settings."""
    top = topology(
        max_model_len=512,
        max_num_seqs=7,
        block_size=32,
        link={"lease_s": 4, "on_failure": "recompute"},
        prefill={"max_num_seqs": 3, "max_num_batched_tokens": 64},
    )
    settings = started(top)
    assert (settings.max_model_len, settings.max_num_seqs, settings.max_num_batched_tokens) == (512, 3, 64)
    assert (settings.block_size, settings.lease_s, settings.recompute) == (32, 4.0, True)
    assert (settings.model, settings.served_model_names) == ("some/model", ("name", "alias"))
    assert (settings.engine_id, settings.role) == ("incarnation-1", Role.PRODUCER)
    assert started(top, Stage.DECODE).role is Role.CONSUMER
    assert started(top, Stage.DECODE).max_num_seqs == 7


def test_flags_of_the_engine_pass_through_and_win() -> None:
    """engine_args carry the emulation's own settings, with either spelling; false uses the --no- twin."""
    args = {"mean_output_tokens": 5, "enable-prefix-caching": False, "max-num-seqs": 2}
    top = topology(engine_args=args, max_num_seqs=9)
    assert EmulatedAdapter().check(top, []) == ([], [])
    settings = started(top)
    assert (settings.mean_output_tokens, settings.prefix_caching, settings.max_num_seqs) == (5, False, 2)


def test_one_pool_alone_needs_no_connector() -> None:
    """Colocated instances neither give nor take KV, and reserve no side channel."""
    top = topology(prefill=None, decode=None, colocated={})
    assert started(top, Stage.COLOCATED).role is Role.NONE


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"encode": {}}, "encode"),
    ({"kv_store": {"url": "redis://x:1"}}, "kv_store"),
    ({"link": {"transport": "shared-memory"}}, "link.transport"),
    ({"decode": {"block_size": 8}, "block_size": 16}, "decode.block_size"),
    ({"engine_args": {"mean-output-token": 5}}, "engine_args.mean-output-token"),
    ({"engine_args": {"mean-output-tokens": "x"}}, "engine_args.mean-output-tokens"),
    ({"engine_args": {"port": 5}}, "engine_args.port"),
]


@pytest.mark.parametrize(("fields", "where"), WRONG)
def test_what_cannot_be_emulated_is_an_error_that_names_its_place(fields: dict[str, Any], where: str) -> None:
    """Found before anything starts."""
    errors, _ = EmulatedAdapter().check(topology(**fields), [])
    assert where in [problem.where for problem in errors]


def test_a_file_for_a_real_engine_can_be_tried_without_a_device() -> None:
    """Flags and fields that only a real engine heeds are warnings, and are left out of the command line."""
    top = topology(
        engine_args={"gpu-memory-utilization": 0.8},
        kv_cache_dtype="fp8",
        decode={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    )
    errors, warnings = EmulatedAdapter().check(top, [])
    assert errors == []
    assert {w.where for w in warnings} == {
        "engine_args.gpu-memory-utilization",
        "kv_cache_dtype",
        "decode.speculative_config",
    }
    started(top)


def test_the_dialect_and_probe_are_the_real_engines() -> None:
    """The router treats an emulated engine exactly as the one that it stands for."""
    adapter = EmulatedAdapter()
    body = adapter.dialect(topology()).prefill_body(Api.COMPLETIONS, {}, Transfer("a" * 32, Peer()))
    assert b"do_remote_decode" in body
    assert adapter.probe().external_hits == 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
    assert adapter.services(topology(), []) == ()


def test_wrong_flags_end_with_their_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    """The process says what is wrong and does not start."""
    assert module.main(["--block-size", "0"]) == 2
    assert "--block-size" in caplog.text
    assert module.main(["--fault", "{"]) == 2


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"env": {"HF_TOKEN": "x"}}, "env.HF_TOKEN"),
        ({"decode": {"env": {"MY_API_KEY": "x"}}}, "decode.env.MY_API_KEY"),
    ],
)
def test_a_secret_in_a_topology_is_refused(fields: dict[str, Any], where: str) -> None:
    """As for real engines: --print-config would show it."""
    errors, _ = EmulatedAdapter().check(topology(**fields), [])
    assert {p.where for p in errors} == {where}


def test_a_policy_that_listens_makes_its_stage_publish() -> None:
    """Into the private directory of the start, as the real engine."""
    top = topology(router={"prefill_policy": "kv-affinity"})
    events = started(top).kv_events
    assert events.on
    assert events.endpoint.startswith("ipc:///run/x/")
    assert events.replay_endpoint != events.endpoint
    assert not started(top, Stage.DECODE).kv_events.on
