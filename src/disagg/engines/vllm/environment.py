"""Environment of one vLLM engine: devices, side channel, and what lets several engines share a CPU."""

from __future__ import annotations

import ipaddress

from disagg.engines.base import StartContext
from disagg.engines.settings import StageSettings, stage_settings
from disagg.engines.vllm.transfer import transfer_config
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Topology

KV_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
"""KV cache of an engine on CPU in whole GiB. Where it is set it wins over ``--kv-cache-memory-bytes``."""

RESERVED: dict[str, str] = {
    "CUDA_VISIBLE_DEVICES": "use the stage's device_groups",
    "HIP_VISIBLE_DEVICES": "use the stage's device_groups",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "use link.side_channel_port",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "use link.bootstrap_port",
    "VLLM_RPC_BASE_PATH": "each instance has a private directory",
    "VLLM_API_KEY": "engines are reached through the router; the key belongs there",
}
"""Variables that are set per instance, with what to use instead."""

COMPILATION_FLAGS = ("enforce-eager", "compilation-config", "optimization-level")
"""vLLM flags by which a user says whether and how an engine compiles."""

_VISIBLE_DEVICES = {Platform.CUDA: "CUDA_VISIBLE_DEVICES", Platform.ROCM: "HIP_VISIBLE_DEVICES"}


def environment(topology: Topology, instance: Instance, context: StartContext) -> dict[str, str]:
    """Variables set on top of the launcher's; the user's own for this stage win, apart from the reserved ones."""
    settings = stage_settings(topology, instance.stage)
    env = {
        "VLLM_LOGGING_LEVEL": "DEBUG" if topology.verbosity >= 2 else "INFO",
        # Usage reports go to vLLM's authors over the network; who wants them sets this to 0.
        "VLLM_NO_USAGE_STATS": "1",
    }
    if topology.verbosity >= 3:
        env["VLLM_LOG_STATS_INTERVAL"] = "1"
    if context.model.startswith("/"):
        # With the files at hand, a look at the hub only costs time, or the start where there is no network.
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    compiles = topology.platform is not Platform.CPU or not is_eager(settings)
    if not compiles:
        # "Eager" leaves a few helpers that compile at their first use: the first request with logprobs made the
        # whole engine wait for g++ for 20 s to 2 min.
        env["TORCHDYNAMO_DISABLE"] = "1"
    if topology.platform is Platform.CPU:
        env |= _cpu(settings, instance)
        if without_worker(topology, settings):
            # On CPU vLLM starts a worker whatever it is told, unless this is off; the core process stays its own.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    env |= settings.env
    env["VLLM_RPC_BASE_PATH"] = context.run_dir
    if not compiles:
        # Compiled code is cached below TMPDIR, and that has to outlive the run.
        env["TMPDIR"] = context.run_dir
    if transfer_config(topology, instance.stage, context.incarnation) is not None:
        env |= _link(topology, settings, instance)
    visible = _VISIBLE_DEVICES.get(topology.platform)
    if visible is not None and instance.devices:
        env[visible] = ",".join(map(str, instance.devices))
    return env


def _link(topology: Topology, settings: StageSettings, instance: Instance) -> dict[str, str]:
    """Where an instance's side of the handoff listens."""
    if topology.link.dialect == "mooncake":
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(instance.bootstrap_port)} if instance.bootstrap_port else {}
    if topology.link.dialect == "lmcache":
        # Both sides look KV up by hashes, which Python seeds anew in each process unless it is told not to.
        return {"PYTHONHASHSEED": settings.env.get("PYTHONHASHSEED", "0")}
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", instance.host),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(instance.side_channel_port),
    }


def unset(topology: Topology, instance: Instance) -> tuple[str, ...]:
    """Variables of the launcher's own environment that would change an engine behind the topology's back."""
    names = ["VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP"]
    if topology.platform is Platform.CPU:
        # A list of plug-ins would leave out ours; the newer model runner needs Triton, which has no CPU back end.
        names += ["VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"]
    settings = stage_settings(topology, instance.stage)
    if "kv-cache-memory-bytes" in settings.engine_args:
        names.append(KV_CACHE_GIB)
    if topology.platform is Platform.ROCM:
        # vLLM refuses to start when the two variables differ.
        names.append("CUDA_VISIBLE_DEVICES")
    return tuple(name for name in names if name not in settings.env)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_eager(settings: StageSettings) -> bool:
    """Whether an engine on CPU runs without compiling; it does unless the user says how to compile."""
    chosen = [flag for flag in COMPILATION_FLAGS if flag in settings.engine_args]
    return not chosen or settings.engine_args.get("enforce-eager") is True


def without_worker(topology: Topology, settings: StageSettings) -> bool:
    """Whether the model runs inside the engine's core process, without a worker of its own.

    Measured on two cores with vLLM 0.32: an engine starts in 26 s in place of 37 s, takes 0.45 GB less, and a decode
    step beside a busy prefill engine takes 0.08 s in place of 0.16 s, because no shared-memory queue is polled.
    """
    backend = settings.engine_args.get("distributed-executor-backend", "uni")
    return topology.platform is Platform.CPU and local_ranks(settings) == 1 and backend == "uni"


def local_ranks(settings: StageSettings) -> int:
    """Worker processes of one instance."""
    shape = settings.parallel
    return shape.tensor * shape.pipeline * shape.data


def _cpu(settings: StageSettings, instance: Instance) -> dict[str, str]:
    env = {
        # vLLM would bind every engine to the same first core; the launcher confines the processes instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Threads that wait for work must not spin: the other engine needs the core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
    if is_loopback(instance.host):
        # UCX would listen on the machine's outer addresses too.
        env["UCX_NET_DEVICES"] = "lo"
    if instance.devices:
        env["OMP_NUM_THREADS"] = str(max(1, len(instance.devices) // local_ranks(settings)))
    return env
