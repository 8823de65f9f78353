"""A deployment as the launcher takes it: its members, and what they have to prove."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from disagg.engines.base import PlannedProcess
from disagg.engines.settings import StageSettings, stage_settings
from disagg.http.origin import Origin
from disagg.launch.handoff_probe import ProbePlan
from disagg.launch.member import Member, Proof
from disagg.serve.deployment import Deployment
from disagg.topology.instances import Instance
from disagg.topology.spec import Stage, Topology


def members(deployment: Deployment) -> list[Member]:
    """All processes of a deployment, services first."""
    probe = deployment.adapter.probe()
    never_ready = re.compile(probe.never_ready) if probe.never_ready else None
    planned = {process.name: process for process in deployment.processes}
    found = [
        Member(s.name, Proof.NOTHING, _always(s), ports=s.ports, devices=s.devices, depends_on=s.depends_on)
        for s in deployment.services
    ]
    for instance in deployment.instances:
        process = planned[instance.name]
        member = Member(
            instance.name,
            proof_of(deployment.topology, instance.stage),
            _planner(deployment, instance),
            Origin.parse(instance.url),
            probe.health_path,
            process.ports,
            process.devices,
            process.depends_on,
            never_ready,
            partial(deployment.peer, instance),
        )
        found.append(member)
    return found


def proof_of(topology: Topology, stage: Stage) -> Proof:
    """What an instance of a stage has to show before it gets traffic."""
    hands_over = topology.prefill is not None and topology.decode is not None
    if stage is Stage.PREFILL:
        return Proof.SENDS if hands_over else Proof.NOTHING
    if stage is Stage.DECODE:
        return Proof.RECEIVES if hands_over else Proof.LOCAL
    return Proof.LOCAL if stage is Stage.COLOCATED else Proof.NOTHING


def probe_plan(deployment: Deployment) -> ProbePlan:
    """What a readiness probe of this deployment sends."""
    topology = deployment.topology
    settings = [stage_settings(topology, stage) for stage in topology.stages() if stage is not Stage.ENCODE]
    limits = [n for s in settings if (n := _tokens(s, s.max_model_len, "max-model-len")) is not None]
    blocks = [n for s in settings if (n := _tokens(s, s.block_size, "block-size")) is not None]
    return ProbePlan(
        deployment.served_model_names[0],
        deployment.adapter.dialect(topology),
        deployment.adapter.probe(),
        max(blocks, default=None),
        min(limits, default=None),
    )


def _tokens(settings: StageSettings, field: int | None, flag: str) -> int | None:
    """A number of tokens from its own field or from the engine's flag of that name."""
    passed = settings.engine_args.get(flag)
    return passed if isinstance(passed, int) and not isinstance(passed, bool) else field


def _always(process: PlannedProcess) -> Callable[[str, str], PlannedProcess]:
    def plan(_incarnation: str, _run_dir: str) -> PlannedProcess:
        return process

    return plan


def _planner(deployment: Deployment, instance: Instance) -> Callable[[str, str], PlannedProcess]:
    def plan(incarnation: str, run_dir: str) -> PlannedProcess:
        return deployment.adapter.process(deployment.topology, instance, deployment.context(incarnation, run_dir))

    return plan
