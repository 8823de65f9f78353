"""Which settings of the router may change while it runs."""

from __future__ import annotations

from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

LIVE = frozenset(
    {
        "prefill_policy", "decode_policy", "encode_policy", "strict",
        "request_timeout_s", "prefill_timeout_s", "first_token_timeout_s", "idle_timeout_s",
        "retries", "recover_streams",
        "health_interval_s", "health_timeout_s", "health_failures", "health_successes",
        "max_in_flight", "max_queue", "queue_timeout_s", "drain_timeout_s",
    }
)  # fmt: skip
"""Settings that are read for each request or question. The others are built into connections, pools and tables."""


def policy_field(stage: Stage) -> str:
    """The setting that names the policy of a stage; colocated instances are chosen as decode's."""
    return "decode_policy" if stage is Stage.COLOCATED else f"{stage}_policy"


def with_live_changes(old: RouterSpec, new: RouterSpec) -> tuple[RouterSpec, list[str], list[str]]:
    """Take over what may change while the router runs.

    Returns:
        The settings then in force; the names of those that have changed; and of those that need a restart to change.
    """
    changed = [name for name in RouterSpec.model_fields if getattr(old, name) != getattr(new, name)]
    taken = [name for name in changed if name in LIVE]
    in_force = old.model_copy(update={name: getattr(new, name) for name in taken})
    return in_force, taken, [name for name in changed if name not in LIVE]
