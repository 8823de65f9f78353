"""`disagg.serve.deployment` and `disagg.serve.members`: a topology laid out on a machine."""

from __future__ import annotations

import os
import socket

import pytest

from disagg.engines.registry import adapter_for
from disagg.errors import ConfigError
from disagg.launch.member import Proof
from disagg.serve.deployment import EACH_START, Deployment, describe, settle
from disagg.serve.members import members, probe_plan, proof_of
from disagg.topology.spec import Platform, Pool, Stage, Topology
from tests.support.launch_fakes import free_port


def topology(platform: Platform = Platform.EMULATED, **fields: object) -> Topology:
    pools = {"prefill": Pool(replicas=2), "decode": Pool(replicas=1)}
    return Topology.model_validate({"model": "m", "platform": platform, "port": free_port(), **pools, **fields})


def described(layout: Topology) -> Deployment:
    return describe(layout, adapter_for(layout.platform), "m")


def test_incarnation_and_directory_are_left_open_in_a_plan() -> None:
    """A plan is the same every time it is printed."""
    layout = topology()
    assert described(layout).processes == described(layout).processes
    assert any(EACH_START in process.argv for process in described(layout).processes)


def test_each_start_gets_its_own_incarnation() -> None:
    """The engine's identity in handoffs is the start, not the address."""
    first = members(described(topology()))[0]
    assert "one" in first.plan("one", "/dir").argv
    assert "two" in first.plan("two", "/dir").argv


def test_cpu_instances_without_groups_share_the_cores_out() -> None:
    """Every core of this machine is used, and the processes are confined to theirs."""
    processes = described(topology(Platform.CPU)).processes
    used = {core for process in processes for core in process.cores or ()}
    assert used == set(os.sched_getaffinity(0))
    assert all(process.cores for process in processes)


@pytest.mark.parametrize(
    ("pools", "stage", "proof"),
    [
        (("prefill", "decode"), Stage.PREFILL, Proof.SENDS),
        (("prefill", "decode"), Stage.DECODE, Proof.RECEIVES),
        (("encode", "decode"), Stage.DECODE, Proof.LOCAL),
        (("encode", "decode"), Stage.ENCODE, Proof.NOTHING),
        (("colocated",), Stage.COLOCATED, Proof.LOCAL),
    ],
)
def test_each_stage_proves_what_it_is_for(pools: tuple[str, ...], stage: Stage, proof: Proof) -> None:
    """Handoffs are proved by both sides; an instance that needs no partner answers a prompt by itself."""
    layout = Topology.model_validate({"model": "m", **{name: {} for name in pools}})
    assert proof_of(layout, stage) is proof


def test_instances_stop_in_the_order_of_a_handoff() -> None:
    """Nobody is left who would pull KV from an instance that has gone."""
    assert described(topology()).stop_groups() == [["prefill-0", "prefill-1"], ["decode-0"]]


def test_a_probe_fits_every_stage() -> None:
    """The smallest context and the largest block count, wherever they were set."""
    layout = topology(
        max_model_len=4096,
        prefill=Pool(replicas=1, max_model_len=2048),
        decode=Pool(replicas=1, engine_args={"block-size": 64}),
        block_size=32,
    )
    plan = probe_plan(described(layout))
    assert (plan.max_model_len, plan.block_tokens) == (2048, 64)
    assert plan.model == "m"


def test_ports_that_are_not_given_move_past_taken_ones() -> None:
    """A second deployment on a machine works without further flags."""
    layout = topology()
    before = settle(layout, adapter_for(Platform.EMULATED), "m").instances[0].port
    with socket.create_server(("127.0.0.1", before)):
        after = settle(layout, adapter_for(Platform.EMULATED), "m").instances[0].port
    assert after != before


def test_given_ports_that_are_taken_are_all_named() -> None:
    """A port that the user chose is not changed behind the user's back; endpoint and instances are told at once."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        first, second = one.getsockname()[1], two.getsockname()[1]
        layout = topology(port=first, decode=Pool(ports=(second,)))
        with pytest.raises(ConfigError) as caught:
            settle(layout, adapter_for(Platform.EMULATED), "m")
    assert [p.where for p in caught.value.problems] == ["port", "decode.ports.0"]


def test_cores_that_do_not_exist_are_named() -> None:
    """A group for another machine is refused before anything starts."""
    layout = topology(Platform.CPU, decode=Pool(device_groups=("900",)))
    with pytest.raises(ConfigError, match="no CPU core 900"):
        settle(layout, adapter_for(Platform.CPU), "m")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1"), ("h", "http://h:1")],
)
def test_the_endpoint_is_written_as_a_client_would(host: str, url: str) -> None:
    """Nobody can connect to 0.0.0.0."""
    assert described(topology(host=host, port=1)).url == url
