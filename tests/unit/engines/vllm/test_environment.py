"""vLLM's environment: devices, side channel, CPU cures, nothing secret."""

from __future__ import annotations

import dataclasses

import pytest

from disagg.engines.base import PlannedProcess, StartContext
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.topology.spec import Platform, Topology
from tests.support.engine_cases import CONTEXT, instance, pair, value_of


def process(topology: Topology, name: str = "prefill-0", context: StartContext = CONTEXT) -> PlannedProcess:
    return VllmAdapter().process(topology, instance(topology, name), context)


def test_engines_on_cpu_do_not_spin_and_keep_to_their_cores() -> None:
    """vLLM's defaults bind every engine to the same first core and let its threads spin there."""
    planned = process(pair(prefill={"device_groups": ["0..3"]}, decode={"device_groups": ["4"]}))
    assert planned.cores == (0, 1, 2, 3)
    assert planned.devices == "CPU cores 0..3"
    assert planned.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert planned.env["GOMP_SPINCOUNT"] == "0"
    assert planned.env["OMP_NUM_THREADS"] == "4"
    assert planned.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_ranks_of_one_engine_share_its_cores() -> None:
    """Two ranks with four threads each on four cores would wait for each other."""
    planned = process(pair(prefill={"device_groups": ["0..3"], "parallel": {"tensor": 2}}))
    assert planned.env["OMP_NUM_THREADS"] == "2"


def test_without_a_device_group_nothing_is_confined_and_the_user_is_told() -> None:
    """An engine that may use every core is legitimate, but not by accident."""
    planned = process(pair(prefill={"device_groups": None}, decode={"device_groups": None}))
    assert planned.cores is None
    assert "OMP_NUM_THREADS" not in planned.env
    assert any("no device group" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("platform", "variable"), [(Platform.CUDA, "CUDA_VISIBLE_DEVICES"), (Platform.ROCM, "HIP_VISIBLE_DEVICES")]
)
def test_accelerators_are_chosen_by_visibility_in_the_order_written(platform: Platform, variable: str) -> None:
    """The order of a group is the order of its ranks; the CPU's settings stay out."""
    planned = process(pair(platform, prefill={"device_groups": ["3,1"], "parallel": {"tensor": 2}}))
    assert planned.env[variable] == "3,1"
    assert planned.cores is None
    assert "OMP_NUM_THREADS" not in planned.env


def test_on_rocm_the_other_variable_is_removed() -> None:
    """vLLM refuses to start when the two differ, and a shell may have set one."""
    assert "CUDA_VISIBLE_DEVICES" in process(pair(Platform.ROCM)).unset_env


def test_the_side_channel_is_told_and_reserved_for_every_rank() -> None:
    """Each data-parallel rank binds its own port, so the launcher has to keep them free."""
    topology = pair(
        Platform.CUDA,
        prefill={"device_groups": ["0,1"], "parallel": {"data": 2}},
        decode={"device_groups": ["2"]},
        link={"side_channel_port": 7000},
    )
    planned = process(topology)
    assert planned.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert planned.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7000"
    assert planned.ports == {"http": 9900, "side-channel": 7000, "side-channel-1": 7001}


def test_a_local_model_needs_no_hub_and_a_named_one_does() -> None:
    """Where there is no network, asking the hub about local files would stop the start."""
    assert process(pair()).env["HF_HUB_OFFLINE"] == "1"
    hub = dataclasses.replace(CONTEXT, model="org/model")
    assert "HF_HUB_OFFLINE" not in process(pair(), context=hub).env


def test_sockets_and_temporary_files_stay_in_the_instances_directory() -> None:
    """What a killed engine leaves behind is found and removed with the run."""
    env = process(pair()).env
    assert env["VLLM_RPC_BASE_PATH"] == CONTEXT.run_dir
    assert env["TMPDIR"] == CONTEXT.run_dir


@pytest.mark.parametrize(
    ("host", "only_loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.5", False)]
)
def test_kv_is_not_offered_on_outer_addresses_unless_the_instance_is(host: str, only_loopback: bool) -> None:
    """The transfer library listens on every network device that it is not told to leave alone."""
    topology = pair()
    local = dataclasses.replace(instance(topology, "prefill-0"), host=host)
    env = VllmAdapter().process(topology, local, CONTEXT).env
    assert (env.get("UCX_NET_DEVICES") == "lo") is only_loopback


def test_an_eager_engine_compiles_nothing_later_either() -> None:
    """The first request with logprobs does not stop the engine for a compiler; one that compiles keeps its cache."""
    assert process(pair()).env["TORCHDYNAMO_DISABLE"] == "1"
    assert process(pair(engine_args={"enforce-eager": True})).env["TORCHDYNAMO_DISABLE"] == "1"
    for choice in ({"enforce-eager": False}, {"compilation-config": {"level": 3}}):
        env = process(pair(engine_args=choice)).env
        assert "TORCHDYNAMO_DISABLE" not in env
        assert "TMPDIR" not in env


def test_the_users_variables_win_over_defaults() -> None:
    """More KV cache or other threads are the user's to choose, per stage."""
    topology = pair(
        env={"OMP_NUM_THREADS": "7"}, prefill={"env": {"GOMP_SPINCOUNT": "9", "VLLM_PLUGINS": "disagg_cpu,x"}}
    )
    assert process(topology).env["OMP_NUM_THREADS"] == "7"
    assert process(topology).env["GOMP_SPINCOUNT"] == "9"
    assert process(topology, "decode-0").env["GOMP_SPINCOUNT"] == "0"
    assert "VLLM_PLUGINS" not in process(topology).unset_env
    assert "VLLM_PLUGINS" in process(topology, "decode-0").unset_env


def test_the_kv_caches_size_has_one_source() -> None:
    """vLLM's variable silently wins over its flag, so only one of them reaches an engine."""
    default = process(pair())
    assert value_of(default.argv, "--kv-cache-memory-bytes") == str(1024**3)
    assert "VLLM_CPU_KVCACHE_SPACE" not in (*default.env, *default.unset_env)
    assert any("1 GiB" in note for note in default.notes)
    flag = process(pair(engine_args={"kv-cache-memory-bytes": "512M"}))
    assert value_of(flag.argv, "--kv-cache-memory-bytes") == "512M"
    assert "VLLM_CPU_KVCACHE_SPACE" in flag.unset_env
    assert not any("1 GiB" in note for note in flag.notes)
    variable = process(pair(env={"VLLM_CPU_KVCACHE_SPACE": "4"}))
    assert "--kv-cache-memory-bytes" not in variable.argv
    assert variable.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "--kv-cache-memory-bytes" not in process(pair(Platform.CUDA)).argv


def test_a_key_in_the_launchers_environment_does_not_lock_the_router_out() -> None:
    """vLLM takes its API key from the environment; the router's calls carry none."""
    assert "VLLM_API_KEY" in process(pair()).unset_env


def test_secrets_are_inherited_and_never_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run prints command line and environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    planned = process(pair())
    assert "HF_TOKEN" not in planned.env
    assert "HF_TOKEN" not in planned.unset_env
    assert "hf_secret" not in repr(planned)


@pytest.mark.parametrize(("verbosity", "level"), [(0, "INFO"), (1, "INFO"), (2, "DEBUG"), (3, "DEBUG")])
def test_verbosity_sets_the_engines_log_level(verbosity: int, level: str) -> None:
    """-v -v -v is what a user types to see more."""
    env = process(pair(verbosity=verbosity)).env
    assert env["VLLM_LOGGING_LEVEL"] == level
    assert ("VLLM_LOG_STATS_INTERVAL" in env) == (verbosity >= 3)
