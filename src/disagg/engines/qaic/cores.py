"""Who uses which NSP cores of which QID: a device may be shared as long as its cores suffice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from disagg.engines.findings import Finding, Findings, error, warning
from disagg.engines.qaic.stage import CORES_PER_QID, StagePlan
from disagg.topology.instances import Instance
from disagg.units import comma_list, format_id_group


class Use(NamedTuple):
    """One model's cores on one QID."""

    who: str
    where: str
    cores: int
    draft: bool


def findings(plans: Sequence[tuple[Instance, StagePlan]]) -> Findings:
    """Devices that are asked for more cores than a QID has, and drafts on devices of another stage."""
    owners: dict[int, str] = {}
    uses: dict[int, list[Use]] = defaultdict(list)
    for instance, stage in plans:
        for device in instance.devices:
            owners.setdefault(device, instance.name)
            uses[device].append(
                Use(instance.name, f"{instance.stage}.device_groups", stage.target_cores, draft=False)
            )
    foreign: set[int] = set()
    for instance, stage in plans:
        if stage.draft is None:
            continue
        where = f"{instance.stage}.speculative_config"
        for device in stage.draft.devices:
            uses[device].append(Use(f"the draft of {instance.name}", where, stage.draft_cores, draft=True))
        others = [d for d in stage.draft.devices if d not in instance.devices and d in owners]
        foreign.update(others)
        if others:
            yield _foreign(where, others, owners, stage, plans)
    yield from _overbooked({device: users for device, users in uses.items() if device not in foreign})


def _foreign(
    where: str,
    devices: Sequence[int],
    owners: dict[int, str],
    stage: StagePlan,
    plans: Sequence[tuple[Instance, StagePlan]],
) -> Finding:
    """A draft on another instance's device, as Qualcomm's own example has it: accepted, and told."""
    names = list(dict.fromkeys(owners[d] for d in devices))
    taken = max(other.target_cores for instance, other in plans if instance.name in names)
    total = taken + stage.draft_cores
    crowd = f", together {total} of {CORES_PER_QID} cores" if total > CORES_PER_QID else ""
    return warning(
        where,
        f"the draft's device_group has QID {format_id_group(tuple(devices))}, which {comma_list(names)} owns{crowd}. "
        "Ids are taken as absolute QIDs of the host; to run the draft beside its target, name the target's devices",
    )


def _overbooked(uses: dict[int, list[Use]]) -> Findings:
    groups: dict[tuple[Use, ...], list[int]] = defaultdict(list)
    for device, users in uses.items():
        if sum(use.cores for use in users) > CORES_PER_QID:
            groups[tuple(users)].append(device)
    for sharers, devices in groups.items():
        total = sum(use.cores for use in sharers)
        parts = comma_list(f"{use.who} {use.cores}" for use in sharers)
        place = next((use.where for use in sharers if use.draft), sharers[-1].where)
        yield error(
            place,
            f"QID {format_id_group(sorted(devices))} has {CORES_PER_QID} cores and is asked for {total} ({parts}); "
            "set num_cores in the override settings, or use other devices",
        )
