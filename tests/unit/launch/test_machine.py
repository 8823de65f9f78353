"""`disagg.launch.machine`: what is found on a machine, and how its cores are shared out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.launch import machine
from disagg.launch.machine import detect_platform, device_ids, gather_facts, share_cores
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Stage
from tests.support.launch_fakes import free_port


def instance(number: int, devices: tuple[int, ...] = ()) -> Instance:
    return Instance(f"decode-{number}", Stage.DECODE, number, devices, "127.0.0.1", 9800 + number, 5600 + number)


def test_cpu_cores_are_those_that_this_process_may_use() -> None:
    """A container's limit counts, not what the board has."""
    assert device_ids(Platform.CPU) == frozenset(os.sched_getaffinity(0))


def test_cuda_devices_are_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control devices are not GPUs."""
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "_DEV", tmp_path)
    assert device_ids(Platform.CUDA) == frozenset({0, 3})


def test_rocm_devices_are_nodes_with_simd_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's driver lists CPUs too."""
    for node, simds in enumerate((0, 256, 256)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 1\nsimd_count {simds}\n")
    monkeypatch.setattr(machine, "_KFD_NODES", tmp_path)
    assert device_ids(Platform.ROCM) == frozenset({0, 1})


def test_qids_come_from_qualcomms_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listing names one QID per device."""
    listing = "QID 0\n\tStatus:Ready\nQID 7\n\tStatus:Ready\n"

    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, listing, "")

    monkeypatch.setattr("subprocess.run", run)
    assert device_ids(Platform.QAIC) == frozenset({0, 7})


def test_qids_are_device_files_where_the_tool_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the devices without the tools."""
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "accel2").touch()
    monkeypatch.setattr(machine, "_DEV", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_ids(Platform.QAIC) == frozenset({2})


@pytest.mark.parametrize(
    ("present", "platform"),
    [
        ((), Platform.CPU),
        ((Platform.CUDA,), Platform.CUDA),
        ((Platform.ROCM,), Platform.ROCM),
        ((Platform.CUDA, Platform.QAIC), Platform.QAIC),
    ],
)
def test_auto_is_the_accelerator_that_is_there(
    present: tuple[Platform, ...], platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one it is the CPU."""
    monkeypatch.setattr(machine, "device_ids", lambda asked: frozenset({0} if asked in present else ()))
    assert detect_platform() is platform


def test_facts_hold_devices_and_taken_ports() -> None:
    """Checks get both in one go."""
    facts = gather_facts(Platform.CPU, [free_port()])
    assert facts.device_ids == frozenset(os.sched_getaffinity(0))
    assert facts.taken_ports == {}


def test_emulated_devices_cannot_be_listed() -> None:
    """Any id is fine for an emulated engine."""
    assert device_ids(Platform.EMULATED) is None


def test_cores_are_divided_evenly() -> None:
    """Two instances on four cores get two neighbours each."""
    shared = share_cores([instance(0), instance(1)], range(4))
    assert [i.devices for i in shared.instances] == [(0, 1), (2, 3)]
    assert shared.warnings == ()


def test_named_cores_are_left_to_their_instance() -> None:
    """An instance without a group gets what no group names."""
    shared = share_cores([instance(0, (1, 2)), instance(1)], range(4))
    assert [i.devices for i in shared.instances] == [(1, 2), (0, 3)]


def test_too_few_cores_are_shared_with_a_warning() -> None:
    """Four instances on two cores run, and the user is told."""
    shared = share_cores([instance(n) for n in range(4)], range(2))
    assert [i.devices for i in shared.instances] == [(0,), (0,), (1,), (1,)]
    assert "share 2 CPU cores" in shared.warnings[0]


def test_no_core_left_is_a_warning() -> None:
    """When groups name every core, the rest shares them."""
    shared = share_cores([instance(0, (0, 1)), instance(1)], range(2))
    assert shared.instances[1].devices == (0, 1)
    assert "decode-1" in shared.warnings[0]


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_instance_gets_cores_and_no_core_idles(instances: int, cores: int) -> None:
    """Shares differ by one core at most, and every core is used."""
    shared = share_cores([instance(n) for n in range(instances)], range(cores))
    sizes = [len(i.devices) for i in shared.instances]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert {core for i in shared.instances for core in i.devices} == set(range(cores))
    if cores >= instances:
        assert sum(sizes) == cores
