"""vLLM as an engine of the deployment: everything that is known about starting it and talking to it."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engines.base import Dialect, FlagTable, Peer, PlannedProcess, ReadinessProbe, StartContext
from disagg.engines.settings import stage_settings
from disagg.engines.speculation import translate
from disagg.engines.vllm import checks, command, dialects, environment, flags
from disagg.engines.vllm.transfer import transfer_config
from disagg.errors import Problem
from disagg.topology.instances import Instance
from disagg.topology.spec import Platform, Topology
from disagg.units import format_id_group


class VllmAdapter:
    """Starts vLLM's OpenAI server on CPU cores, CUDA or ROCm devices."""

    name = "vllm"

    def flag_table(self) -> FlagTable:
        """The flags of the vLLM version that this adapter was made for."""
        return flags.flag_table()

    def check(self, topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
        """Errors and warnings of this topology on vLLM."""
        return checks.check(topology, instances, self.flag_table())

    def services(self, topology: Topology, instances: Sequence[Instance]) -> tuple[PlannedProcess, ...]:
        """None: prefill keeps its KV itself until decode has read it."""
        del topology, instances
        return ()

    def process(self, topology: Topology, instance: Instance, context: StartContext) -> PlannedProcess:
        """The OpenAI server of one instance with its workers."""
        on_cpu = topology.platform is Platform.CPU
        return PlannedProcess(
            name=instance.name,
            argv=command.argv(topology, instance, context, self.flag_table().flags),
            env=environment.environment(topology, instance, context),
            unset_env=environment.unset(topology, instance),
            cores=instance.devices if on_cpu and instance.devices else None,
            devices=_devices(topology.platform, instance),
            ports=_ports(topology, instance, context),
            notes=tuple(_notes(topology, instance)),
        )

    def dialect(self, topology: Topology) -> Dialect:
        """The one that the topology names; NIXL pull if it names none."""
        return dialects.DIALECTS[topology.link.dialect]()

    def peer(self, topology: Topology, instance: Instance, incarnation: str) -> Peer:
        """Engine id, side channel and bootstrap server of one start."""
        return dialects.peer(topology, instance, incarnation)

    def probe(self) -> ReadinessProbe:
        """vLLM's own health and metrics."""
        return ReadinessProbe(
            health_path="/health",
            metrics_path="/metrics",
            # Not external_prefix_cache_hits: that one counts a load when it is planned, so it also rises for KV that
            # never came and was recomputed.
            external_hits='vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
            kv_events_path="/kv_event_sources",
            cache_info="vllm:cache_config_info",
            # Without its listener the engine waits for ever for the listener's word that it is ready.
            never_ready=r"Exception in thread nixl_handshake_listener",
        )


def _ports(topology: Topology, instance: Instance, context: StartContext) -> dict[str, int]:
    ports = {"http": instance.port}
    if transfer_config(topology, instance.stage, context.incarnation) is not None:
        ports["side-channel"] = instance.side_channel_port
        # Each data-parallel rank listens on the port of its index.
        ports |= {f"side-channel-{n}": instance.side_channel_port + n for n in range(1, instance.side_channel_ports)}
    if instance.bootstrap_port:
        ports["bootstrap"] = instance.bootstrap_port
    return ports


def _devices(platform: Platform, instance: Instance) -> str:
    if not instance.devices:
        return "all CPU cores" if platform is Platform.CPU else "all visible devices"
    kind = {Platform.CPU: "CPU cores", Platform.ROCM: "HIP devices"}.get(platform, "CUDA devices")
    return f"{kind} {format_id_group(instance.devices)}"


def _notes(topology: Topology, instance: Instance) -> list[str]:
    settings = stage_settings(topology, instance.stage)
    on_cpu = topology.platform is Platform.CPU
    notes: list[str] = []
    if settings.max_seq_len_to_capture is not None:
        notes.append(
            f"max_seq_len_to_capture {settings.max_seq_len_to_capture} is passed as --long-prefill-token-threshold: "
            "prompt tokens of one request per step; the CUDA graph limit of that name is gone from vLLM"
        )
    if settings.speculative_config is not None:
        renamed = translate(settings.speculative_config).renamed
        notes.extend(f"speculative_config: {old} is passed as {new}" for old, new in renamed)
    if (
        on_cpu
        and "kv-cache-memory-bytes" not in settings.engine_args
        and environment.KV_CACHE_GIB not in settings.env
    ):
        notes.append("the KV cache is 1 GiB; --kv-cache-memory-bytes sets another size")
    if on_cpu and not instance.devices:
        notes.append("no device group: this engine shares all CPU cores with the others")
    return notes
