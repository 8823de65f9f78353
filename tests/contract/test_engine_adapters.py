"""One suite for every engine adapter: what it plans is complete, repeatable, free of secrets, and touches nothing."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import EngineAdapter, PlannedProcess
from disagg.engines.registry import ADAPTERS, ENGINE_OF, adapter_for
from disagg.topology.instances import plan_instances
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import CONTEXT, pair

PLATFORMS = [p for p, name in ENGINE_OF.items() if find_spec(ADAPTERS[name].partition(":")[0]) is not None]
SHAPES: dict[str, dict[str, Any]] = {
    "1P1D": {},
    "2P1D": {"prefill": {"device_groups": ["0", "1"]}, "decode": {"device_groups": ["2"]}},
    "1P2D without devices": {"prefill": {"device_groups": None}, "decode": {"device_groups": None, "replicas": 2}},
    "colocated": {"prefill": None, "decode": None, "colocated": {"device_groups": ["0"]}},
    "everything set": {
        "max_model_len": 2048,
        "block_size": 32,
        "kv_cache_dtype": "auto",
        "generation_config": "vllm",
        "seed": 1,
        "verbosity": 3,
        "prefill": {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "max_seq_len_to_capture": 256},
        "decode": {
            "max_num_seqs": 8,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5},
            "env": {"A": "b"},
        },
    },
}
CASES = [
    pytest.param(adapter_for(platform), pair(platform, **fields), id=f"{platform}-{name}")
    for platform in PLATFORMS
    for name, fields in SHAPES.items()
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
FLAG_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True) | st.sampled_from(
    ["model", "port", "dtype", "block-size", "kv-cache-dtype", "max-num-seqs", "enforce-eager", "hf-overrides.a"]
)


def planned(adapter: EngineAdapter, topology: Topology) -> list[PlannedProcess]:
    instances = plan_instances(topology)
    return [*adapter.services(topology, instances), *(adapter.process(topology, i, CONTEXT) for i in instances)]


@pytest.mark.parametrize(("adapter", "topology"), CASES)
class TestPlans:
    """What an adapter plans for each shape."""

    def test_the_topology_is_one_that_the_adapter_accepts(self, adapter: EngineAdapter, topology: Topology) -> None:
        """The other tests would prove little on a topology that is refused."""
        assert adapter.check(topology, plan_instances(topology))[0] == []

    def test_every_instance_has_its_process_under_its_name(self, adapter: EngineAdapter, topology: Topology) -> None:
        """The launcher, the router and the log files know an instance by its name."""
        names = [process.name for process in planned(adapter, topology)]
        assert len(names) == len(set(names))
        assert {i.name for i in plan_instances(topology)} <= set(names)

    def test_every_port_is_declared_once(self, adapter: EngineAdapter, topology: Topology) -> None:
        """The launcher reserves what is declared; an undeclared port collides with a neighbour at start."""
        instances = {i.name: i for i in plan_instances(topology)}
        processes = planned(adapter, topology)
        ports = [port for process in processes for port in process.ports.values()]
        assert len(ports) == len(set(ports))
        for process in processes:
            words = [*process.argv, *process.env.values()]
            if process.name in instances:
                assert process.ports["http"] == instances[process.name].port
                assert str(instances[process.name].port) in words
            for port in process.ports.values():
                assert 1 <= port <= 65535

    def test_what_a_process_waits_for_is_planned_before_it(self, adapter: EngineAdapter, topology: Topology) -> None:
        """A name that nobody has would make the launcher wait for ever."""
        seen: set[str] = set()
        for process in planned(adapter, topology):
            assert set(process.depends_on) <= seen
            seen.add(process.name)

    def test_a_plan_is_repeatable(
        self, adapter: EngineAdapter, topology: Topology, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a dry run shows is what a start runs, whatever the shell holds."""
        first = planned(adapter, topology)
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        monkeypatch.chdir("/")
        assert planned(adapter, topology) == first

    def test_planning_touches_nothing(
        self, adapter: EngineAdapter, topology: Topology, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A dry run opens no file and no connection, and starts nothing."""
        adapter.flag_table()  # package data, read once

        def refuse(*_: object, **__: object) -> NoReturn:
            raise AssertionError("an adapter acted")

        monkeypatch.setattr(builtins, "open", refuse)
        monkeypatch.setattr(os, "mkdir", refuse)
        monkeypatch.setattr(os, "stat", refuse)
        monkeypatch.setattr(socket, "socket", refuse)
        monkeypatch.setattr(subprocess, "Popen", refuse)
        instances = plan_instances(topology)
        processes = planned(adapter, topology)
        adapter.check(topology, instances)
        adapter.dialect(topology)
        monkeypatch.undo()
        assert processes

    def test_no_secret_is_written_down(
        self, adapter: EngineAdapter, topology: Topology, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plan is printed by --dry-run and shown to every user by ps."""
        monkeypatch.setenv("HF_TOKEN", "hf_do_not_show")
        for process in planned(adapter, topology):
            assert "hf_do_not_show" not in repr(process)
            assert not any("TOKEN" in name or "API_KEY" in name for name in process.env)
            assert "HF_TOKEN" not in process.unset_env

    def test_modules_come_from_installed_packages_alone(self, adapter: EngineAdapter, topology: Topology) -> None:
        """Python's ``-m`` looks into the current folder first, where anything may lie, unless told not to."""
        for process in planned(adapter, topology):
            assert "-P" in process.argv[: process.argv.index("-m")]

    def test_a_command_line_is_text_and_says_nothing_twice(self, adapter: EngineAdapter, topology: Topology) -> None:
        """Of a doubled flag the last one wins, silently."""
        for process in planned(adapter, topology):
            assert all(isinstance(word, str) and word for word in process.argv)
            assert all(isinstance(value, str) for value in process.env.values())
            flags = [word.removeprefix("--no-").removeprefix("--") for word in process.argv if word.startswith("--")]
            assert len(flags) == len(set(flags)), flags

    def test_a_process_never_sets_and_unsets_a_variable(self, adapter: EngineAdapter, topology: Topology) -> None:
        """Which one won would depend on the launcher."""
        for process in planned(adapter, topology):
            assert not process.env.keys() & set(process.unset_env)

    def test_cores_are_for_cpu_alone(self, adapter: EngineAdapter, topology: Topology) -> None:
        """Device ids of an accelerator are no CPU cores."""
        if topology.platform in (Platform.CUDA, Platform.ROCM, Platform.QAIC):
            assert all(process.cores is None for process in planned(adapter, topology))

    def test_an_engine_tells_where_to_ask_for_its_health(self, adapter: EngineAdapter, topology: Topology) -> None:
        """The launcher and the router ask there."""
        probe = adapter.probe()
        assert probe.health_path.startswith("/")
        assert probe.metrics_path.startswith("/")
        assert probe.running
        assert probe.waiting
        assert adapter.dialect(topology).name


@pytest.mark.parametrize("platform", PLATFORMS)
class TestChecks:
    """What an adapter says about a topology."""

    def test_every_problem_is_told_at_once(self, platform: Platform) -> None:
        """Faults in different places are all found by one call, each at its place."""
        if ENGINE_OF[platform] == "emulated":
            pytest.skip("an emulated engine has few things that could be wrong")
        topology = pair(
            platform,
            kv_store={"url": "redis://localhost:1"},
            engine_args={"model": "other", "no-such-flag-at-all": 1},
            env={"HF_TOKEN": "x"},
            prefill={"engine_args": {"port": 1}},
            decode={"engine_args": {"enforce-eager": "perhaps"}},
        )
        errors, _ = adapter_for(platform).check(topology, plan_instances(topology))
        places = {problem.where for problem in errors}
        assert {
            "kv_store",
            "engine_args.model",
            "engine_args.no-such-flag-at-all",
            "env.HF_TOKEN",
            "prefill.engine_args.port",
            "decode.engine_args.enforce-eager",
        } <= places
        assert len(errors) == len(set(errors))

    @given(
        args=st.dictionaries(FLAG_NAMES, JSON, max_size=3),
        speculation=st.none() | st.dictionaries(st.sampled_from(["method", "model", "num_speculative_tokens"]), JSON),
        override=st.none() | st.dictionaries(st.sampled_from(["num_cores", "device_group", "stages", "x"]), JSON),
    )
    def test_nonsense_is_judged_and_never_raises(
        self, platform: Platform, args: dict[str, Any], speculation: dict[str, Any], override: dict[str, Any]
    ) -> None:
        """A strange file is answered in words; what passes can be planned."""
        topology = pair(
            platform,
            prefill={"engine_args": args},
            decode={"speculative_config": speculation, "override_qaic_config": override},
        )
        adapter = adapter_for(platform)
        errors, warnings = adapter.check(topology, plan_instances(topology))
        assert all(problem.message for problem in (*errors, *warnings))
        if not errors:
            assert planned(adapter, topology)

    def test_reserved_flags_say_what_to_use(self, platform: Platform) -> None:
        """A refusal without a way out sends the user to the source code."""
        table = adapter_for(platform).flag_table()
        assert all(table.reserved.values())
        assert table.engine


def test_the_suite_covers_the_real_engines() -> None:
    """A platform that silently dropped out of the list would go untested."""
    assert {Platform.CPU, Platform.CUDA, Platform.ROCM, Platform.QAIC} <= set(PLATFORMS)
