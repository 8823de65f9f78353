"""Both ways of using the same devices, and what a reader is warned of."""

from __future__ import annotations

import json

import pytest

from disagg.cli.main import main
from disagg.project.compare import colocated_twin, compare
from disagg.project.figures import project
from disagg.project.setup import Setup, make_setup
from disagg.topology.projection_spec import Projection
from disagg.topology.spec import Link, ParallelShape, Pool, Topology
from disagg.topology.workload_spec import Workload

MODEL = "llama-3.1-8b"


def setup_of(prefill: int = 1, decode: int = 2, **workload: int) -> Setup:
    """So many replicas of one H100 each."""
    return make_setup(
        Topology(
            model=MODEL,
            prefill=Pool(replicas=prefill),
            decode=Pool(replicas=decode),
            link=Link(bandwidth_gbps=400.0),
            workload=Workload(**{"input_len": 1024, "output_len": 256, "max_concurrency": 32, **workload}),
            projection=Projection(accelerator="h100-sxm"),
        )
    )


def test_the_baseline_has_the_same_devices_and_load() -> None:
    """Three devices apart, three replicas of decode's shape together."""
    twin, said = colocated_twin(setup_of(1, 2))
    assert (twin.prefill, twin.decode) == (None, None)
    assert twin.colocated is not None
    assert twin.colocated.replicas == 3
    assert "3 replica(s) of decode's shape on the same 3 devices" in said
    pair = compare(setup_of(1, 2))
    assert pair.split.figures["replica_gpus"].value == pair.together.figures["replica_gpus"].value == 3
    assert pair.split.number("concurrency_used") == pair.together.number("concurrency_used") == 32


def test_devices_that_the_baseline_cannot_use_are_named() -> None:
    """Prefill of one device beside decode of two leaves one over."""
    setup = make_setup(
        Topology(
            model=MODEL,
            prefill=Pool(replicas=1),
            decode=Pool(replicas=1, parallel=ParallelShape(tensor=2)),
            projection=Projection(accelerator="h100-sxm"),
        )
    )
    assert "1 of them unused" in colocated_twin(setup)[1]


def test_a_token_is_never_slower_apart_with_the_same_sequences_per_replica() -> None:
    """The same number of sequences per engine, and no prompts in its steps."""
    pair = compare(setup_of(1, 2, max_concurrency=32))
    # 16 sequences per decode replica apart, 11 per replica together: pure steps differ, so compare with the lift.
    assert pair.together.number("tpot_lift_pct") > 0
    assert pair.split.number("tpot_lift_pct") == 0
    alone = project(setup_of(1, 3, max_concurrency=33))
    together = compare(setup_of(1, 2, max_concurrency=33)).together
    # 11 sequences per replica in both.
    assert alone.number("tpot_ms") <= together.number("tpot_ms")


def test_the_limit_names_the_slower_pool_and_both_rates() -> None:
    """One prefill replica for eight decode replicas is too little; eight for one is too much."""
    scarce = project(setup_of(1, 8, input_len=8192, output_len=64, max_concurrency=128))
    assert scarce.figures["limiting_pool"].value == "prefill"
    assert scarce.limit.startswith("the prefill pool (1 x 1 devices): ")
    plenty = project(setup_of(8, 1, input_len=256, output_len=2048, max_concurrency=64))
    assert plenty.figures["limiting_pool"].value == "decode"
    assert plenty.limit.startswith("the decode pool (1 x 1 devices): ")


def test_a_reader_is_warned_of_a_slow_link_and_of_a_load_that_does_not_fit() -> None:
    """Each as a sentence that says what to do or what was done."""
    slow = make_setup(
        Topology(
            model=MODEL,
            prefill=Pool(replicas=1),
            decode=Pool(replicas=1),
            link=Link(bandwidth_gbps=8.0),
            workload=Workload(input_len=2048, output_len=64, max_concurrency=100_000),
            projection=Projection(accelerator="h100-sxm"),
        )
    )
    told = " ".join(project(slow).warnings)
    assert "The KV transfer takes longer than the prefill" in told
    assert "100000 requests at once were asked for" in told


def test_little_interference_is_said_before_anything_is_split() -> None:
    """Short prompts and long answers: there is nothing to win back."""
    setup = make_setup(
        Topology(
            model=MODEL,
            colocated=Pool(replicas=1),
            workload=Workload(input_len=64, output_len=2048, max_concurrency=16),
            projection=Projection(accelerator="h100-sxm"),
        )
    )
    assert "unlikely to pay for the KV transfer" in " ".join(project(setup).warnings)


@pytest.mark.parametrize("machine", [False, True])
def test_the_command_shows_both_side_by_side(machine: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for machines."""
    words = ["--model", MODEL, "--accelerator", "h100-sxm", "--disaggregate", "--max-concurrency", "16"]
    assert main(["project", *words, "--compare", "colocated", *(["--json"] if machine else [])]) == 0
    out = capsys.readouterr().out
    if machine:
        found = json.loads(out)
        assert found["disaggregated"]["mode"] == "disaggregated"
        assert found["colocated"]["mode"] == "colocated"
        assert set(found["change"]) >= {"ttft_ms", "itl_ms"}
    else:
        assert "Verdict" in out


def test_only_a_split_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """And only with what there is."""
    words = ["project", "--model", MODEL, "--accelerator", "h100-sxm"]
    assert main([*words, "--compare", "colocated"]) == 2
    assert "needs separate pools" in capsys.readouterr().err
    assert main([*words, "--compare", "dreams"]) == 2
    assert "'dreams'" in capsys.readouterr().err
