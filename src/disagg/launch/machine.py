"""What this machine has: cores, accelerators, ports. Everything is looked up here, so that checks stay pure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disagg.launch.ports import taken_ports
from disagg.topology.instances import Instance
from disagg.topology.machine import MachineFacts
from disagg.topology.spec import Platform
from disagg.units import format_id_group

_DEV = Path("/dev")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_TOOL_LIMIT_S = 20.0
_NVIDIA_DEVICE = re.compile(r"nvidia(\d+)")
_ACCEL_DEVICE = re.compile(r"accel(\d+)")
_QID = re.compile(r"^\s*QID\s+(\d+)", re.MULTILINE)


def detect_platform() -> Platform:
    """What the platform ``auto`` stands for here: an accelerator if its devices are there, else the CPU.

    Where several kinds are present, Qualcomm's come before CUDA's and these before AMD's: a host with a dedicated
    inference card was bought for it.
    """
    for platform in (Platform.QAIC, Platform.CUDA, Platform.ROCM):
        if device_ids(platform):
            return platform
    return Platform.CPU


def gather_facts(platform: Platform, ports: Collection[int]) -> MachineFacts:
    """Look at the devices of one platform and at the ports of one deployment.

    Args:
        platform: A platform other than ``auto``.
        ports: TCP ports that the deployment is going to bind.
    """
    return MachineFacts(device_ids(platform), taken_ports(ports))


def device_ids(platform: Platform) -> frozenset[int] | None:
    """The ids that device groups may name on this machine; None if they cannot be listed here."""
    if platform is Platform.CPU:
        return frozenset(os.sched_getaffinity(0))
    if platform is Platform.CUDA:
        return _numbered(_DEV, _NVIDIA_DEVICE)
    if platform is Platform.ROCM:
        return frozenset(range(_rocm_count()))
    if platform is Platform.QAIC:
        return _qids()
    return None


@dataclass(frozen=True, slots=True)
class Shared:
    """Instances with their CPU cores.

    Attributes:
        instances: As they were, with devices where they had none.
        warnings: What is odd about it.
    """

    instances: tuple[Instance, ...]
    warnings: tuple[str, ...] = ()


def share_cores(instances: Sequence[Instance], cores: Iterable[int]) -> Shared:
    """Divide the cores that no group names evenly over the instances without a group.

    With fewer cores than such instances they share: neighbours in the list, so that prefill and decode meet on one
    core as late as possible. Cores that do not divide evenly go to the first instances.
    """
    named = {core for instance in instances for core in instance.devices}
    hungry = [instance for instance in instances if not instance.devices]
    if not hungry:
        return Shared(tuple(instances))
    every = sorted(set(cores))
    free = [core for core in every if core not in named]
    warnings: list[str] = []
    if not free:
        free = every
        names = ", ".join(instance.name for instance in hungry)
        warnings.append(f"{names} has no device group and no core is left: it shares the cores of the others")
    count, size = len(hungry), len(free)
    given: dict[str, tuple[int, ...]] = {}
    for place, instance in enumerate(hungry):
        first, last = place * size // count, (place + 1) * size // count
        given[instance.name] = tuple(free[first : max(last, first + 1)])
    if size < count and not warnings:
        warnings.append(
            f"{count} instances without a device group share {size} CPU core{'s' if size != 1 else ''} "
            f"({format_id_group(free)}): they will slow each other down"
        )
    placed = tuple(replace(i, devices=given.get(i.name, i.devices)) for i in instances)
    return Shared(placed, tuple(warnings))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> frozenset[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return frozenset()
    return frozenset(int(match[1]) for name in names if (match := pattern.fullmatch(name)) is not None)


def _rocm_count() -> int:
    """GPUs that AMD's kernel driver lists; CPUs are nodes too, without SIMD units."""
    count = 0
    for properties in sorted(_KFD_NODES.glob("*/properties")):
        try:
            text = properties.read_text(encoding="utf-8")
        except OSError:
            continue
        match = re.search(r"^simd_count (\d+)$", text, re.MULTILINE)
        count += match is not None and int(match[1]) > 0
    return count


def _qids() -> frozenset[int]:
    """QIDs as Qualcomm's tool prints them, or one per accelerator device where the tool is missing."""
    tool = shutil.which("qaic-util") or "/opt/qti-aic/tools/qaic-util"
    try:
        run = subprocess.run([tool, "-q"], capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return _numbered(_DEV / "accel", _ACCEL_DEVICE)
    return frozenset(int(number) for number in _QID.findall(run.stdout))
