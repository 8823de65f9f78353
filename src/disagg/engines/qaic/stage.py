"""What one stage compiles and runs on Cloud AI: role, compile settings, cores, draft."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engines.qaic.override import Config, Override, normalise
from disagg.engines.settings import StageSettings, stage_settings
from disagg.engines.speculation import Translation, translate
from disagg.topology.instances import Instance, pool_size
from disagg.topology.spec import Stage, Topology

CORES_PER_QID = 16
"""NSP cores of a QID on AI 100 Pro and Ultra. Other cards have fewer, which only the machine knows."""

DRAFT_KEY = "draft_override_qaic_config"
MXINT8_NAMES = frozenset({"fp8", "mxint8"})
"""KV cache formats that become MXINT8: 8 bits with a shared exponent."""

_ROLES = {Stage.PREFILL: "kv_producer", Stage.DECODE: "kv_consumer"}


def hands_over(topology: Topology) -> bool:
    """Whether prompts are computed by one pool and continued by another."""
    return topology.prefill is not None and topology.decode is not None


def role(topology: Topology, stage: Stage) -> str | None:
    """The stage's side of the handoff; None if it neither gives nor takes KV."""
    return _ROLES.get(stage) if hands_over(topology) else None


def rank(topology: Topology, instance: Instance) -> int:
    """The instance's number among all that hand KV over, prefill first."""
    if instance.stage is Stage.DECODE and topology.prefill is not None:
        return pool_size(topology.prefill, Stage.PREFILL) + instance.index
    return instance.index


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model on decode's devices, or on its own.

    Attributes:
        override: Its compile settings.
        devices: Its QIDs; those of the target if it was given none.
    """

    override: Override
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One instance's settings, as the engine gets them.

    Attributes:
        settings: The stage's fields.
        override: The target's compile settings, with what its role and devices imply.
        speculation: Speculative settings in the present spelling, without the draft's compile settings.
        draft: The draft model, if the method is one.
    """

    settings: StageSettings
    override: Override
    speculation: Translation | None
    draft: Draft | None

    @property
    def target_cores(self) -> int:
        """NSP cores of the target on each of its QIDs."""
        return self.override.integer("num_cores") or _default_cores(self, CORES_PER_QID)

    @property
    def draft_cores(self) -> int:
        """NSP cores of the draft on each of its QIDs; 0 without a draft model."""
        if self.draft is None:
            return 0
        return self.draft.override.integer("num_cores") or _default_cores(self, CORES_PER_QID)


def plan(topology: Topology, instance: Instance) -> StagePlan:
    """Settings of one instance."""
    settings = stage_settings(topology, instance.stage)
    override = normalise(settings.override_qaic_config or {}, settings.max_model_len)
    _complete(override, role(topology, instance.stage), instance.devices)
    speculation, draft = _speculation(settings, instance)
    return StagePlan(settings, override, speculation, draft)


def is_draft_model(speculation: Translation | None) -> bool:
    """Whether tokens are proposed by a model with a binary of its own."""
    return speculation is not None and speculation.config.get("method") == "draft_model"


def _complete(override: Override, role_name: str | None, devices: tuple[int, ...]) -> None:
    """Add what follows from the role and the device group; what the user wrote stays, the checks compare it."""
    if role_name is not None:
        override.config.setdefault("prefill_only", role_name == "kv_producer")
    if devices:
        override.config.setdefault("device_group", list(devices))
        override.config.setdefault("num_devices", len(devices))


def _speculation(settings: StageSettings, instance: Instance) -> tuple[Translation | None, Draft | None]:
    if settings.speculative_config is None:
        return None, None
    given = translate(settings.speculative_config)
    config: Config = {key: value for key, value in given.config.items() if key != DRAFT_KEY}
    speculation = Translation(config, given.renamed, given.conflicts)
    raw = given.config.get(DRAFT_KEY)
    if not is_draft_model(speculation):
        return speculation, None
    override = normalise(raw if isinstance(raw, dict) else {}, settings.max_model_len)
    devices = override.device_group or instance.devices
    if devices:
        override.config.setdefault("device_group", list(devices))
        override.config.setdefault("num_devices", len(devices))
    return speculation, Draft(override, devices)


def _default_cores(stage: StagePlan, all_cores: int) -> int:
    """All of a QID, or half of it where target and draft share one."""
    if stage.draft is None:
        return all_cores
    own = stage.override.device_group or ()
    return all_cores // 2 if set(own) & set(stage.draft.devices) else all_cores
