"""Qualcomm Cloud AI as an engine of the deployment, from the public documents of its vLLM plug-in."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.engines.base import Dialect, FlagTable, Peer, PlannedProcess, ReadinessProbe, StartContext
from disagg.engines.qaic import checks, command
from disagg.engines.qaic.dialect import ContentDialect
from disagg.engines.qaic.stage import hands_over, plan, role
from disagg.errors import Problem
from disagg.topology.instances import Instance
from disagg.topology.spec import Topology
from disagg.units import format_id_group

HANDOFF_SERVICE = "kv-handoff"


class QaicAdapter:
    """Starts vLLM's OpenAI server on Cloud AI devices, and the service that hands KV over."""

    name = "qaic"

    def flag_table(self) -> FlagTable:
        """vLLM's flags, apart from those that this adapter sets."""
        return command.flag_table()

    def check(self, topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
        """Errors and warnings of this topology on Cloud AI."""
        return checks.check(topology, instances)

    def services(self, topology: Topology, instances: Sequence[Instance]) -> tuple[PlannedProcess, ...]:
        """The hand-off service, where prefill and decode are separate."""
        del instances
        if not hands_over(topology):
            return ()
        link = topology.link
        notes = [checks.DRY_RUN_ONLY, "a single point of failure: without it no request can be handed over"]
        if link.handoff_store_mb is None and link.handoff_store_entries is None:
            notes.append("its size is the service's own default; too small a store fails requests on decode")
        return (
            PlannedProcess(
                name=HANDOFF_SERVICE,
                argv=command.handoff_argv(topology),
                devices="host shared memory",
                ports={"handoff": link.handoff_port},
                notes=tuple(notes),
            ),
        )

    def process(self, topology: Topology, instance: Instance, context: StartContext) -> PlannedProcess:
        """The OpenAI server of one instance; the first start compiles its binary, which takes minutes."""
        stage = plan(topology, instance)
        notes = [checks.DRY_RUN_ONLY]
        if stage.settings.max_seq_len_to_capture is not None:
            notes.append(
                f"max_seq_len_to_capture {stage.settings.max_seq_len_to_capture} is passed as "
                "--long-prefill-token-threshold, its newer name"
            )
        if stage.speculation is not None:
            notes.extend(f"speculative_config: {old} is passed as {new}" for old, new in stage.speculation.renamed)
        paired = role(topology, instance.stage) is not None
        return PlannedProcess(
            name=instance.name,
            argv=command.argv(topology, instance, context),
            env=command.environment(topology, instance),
            unset_env=("VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP"),
            devices=f"QID {format_id_group(instance.devices)}" if instance.devices else "all visible QIDs",
            ports={"http": instance.port},
            depends_on=(HANDOFF_SERVICE,) if paired else (),
            notes=tuple(notes),
        )

    def dialect(self, topology: Topology) -> Dialect:
        """Content-keyed: nothing travels through the router."""
        del topology
        return ContentDialect()

    def peer(self, topology: Topology, instance: Instance, incarnation: str) -> Peer:
        """Nothing: prefill and decode meet in the hand-off service."""
        del topology, instance, incarnation
        return Peer()

    def probe(self) -> ReadinessProbe:
        """vLLM's own health and metrics; the connector counts no loaded tokens."""
        return ReadinessProbe(
            health_path="/health",
            metrics_path="/metrics",
            external_hits=None,
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
        )
