"""The same devices as separate pools and as engines that do both, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ConfigError, Problem
from disagg.project.figures import project
from disagg.project.result import Projection
from disagg.project.setup import Setup, make_setup
from disagg.project.warnings import SMALL_LIFT
from disagg.topology.spec import Pool, Stage, Topology

# Figures that are compared, and whether more is better.
COMPARED: dict[str, bool] = {
    "ttft_ms": False,
    "itl_ms": False,
    "request_latency_ms": False,
    "max_sustainable_request_rate": True,
    "total_throughput_tps_per_gpu": True,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways of using the same devices.

    Attributes:
        split: Separate pools.
        together: Engines that do both.
        baseline: What the latter are, in words.
        verdict: What separate pools change, in words.
        reason: Why, in words.
    """

    split: Projection
    together: Projection
    baseline: str
    verdict: str
    reason: str

    def change(self, name: str) -> float:
        """By what share a figure of the split is larger than the baseline's."""
        before = self.together.number(name)
        return self.split.number(name) / before - 1 if before else 0.0


def compare(setup: Setup) -> Comparison:
    """Project a split and its colocated baseline under the same load.

    Raises:
        ConfigError: If the topology is no split, or the baseline cannot be projected.
    """
    if not setup.split:
        told = "needs separate pools: give --disaggregate, or prefill and decode pools"
        raise ConfigError([Problem("--compare colocated", told)])
    topology, baseline = colocated_twin(setup)
    split, together = project(setup), project(make_setup(topology))
    pair = Comparison(split, together, baseline, "", "")
    return Comparison(split, together, baseline, _verdict(pair), _reason(pair))


def colocated_twin(setup: Setup) -> tuple[Topology, str]:
    """The file's own colocated pool; else decode's shape, as often as the devices of all pools allow."""
    topology = setup.topology
    pool, said = topology.colocated, "the file's colocated pool"
    if pool is None and topology.decode is not None:
        each = setup.pools[Stage.DECODE].replica.shape.devices
        count = max(setup.devices // each, 1)
        pool = topology.decode.model_copy(update={"replicas": count, "device_groups": None, "ports": None})
        rest = setup.devices - count * each
        said = f"{count} replica(s) of decode's shape on the same {setup.devices} devices"
        said += f", {rest} of them unused" if rest > 0 else ""
    settings = topology.projection.model_copy(update={"disaggregate": False})
    update: dict[str, Pool | object | None] = {
        "prefill": None,
        "decode": None,
        "encode": None,
        "colocated": pool,
        "projection": settings,
    }
    return topology.model_copy(update=update), said


def _verdict(pair: Comparison) -> str:
    words = {"ttft_ms": "TTFT", "itl_ms": "ITL", "total_throughput_tps_per_gpu": "tokens per device"}
    return ", ".join(f"{word} {pair.change(name) * 100:+.0f} %" for name, word in words.items())


def _reason(pair: Comparison) -> str:
    lift = pair.together.number("tpot_lift_pct")
    itl, rate = pair.change("itl_ms"), pair.change("total_throughput_tps_per_gpu")
    if lift < SMALL_LIFT * 100:
        return f"prompts lengthen a token by {lift:.1f} % only in the baseline, so there is little to win back"
    if rate < 0 and itl < 0:
        return (
            f"a token is free of the {lift:.0f} % that prompts add in the baseline, but {pair.split.limit}: another "
            "number of replicas may keep the one and win the other"
        )
    if rate < 0:
        return f"the pools do not fit each other: {pair.split.limit}"
    return f"a token is free of the {lift:.0f} % that prompts add in the baseline"
