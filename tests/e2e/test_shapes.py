"""Disaggregation is invisible: every shape answers as one aggregated engine does, and really hands KV over."""

from __future__ import annotations

from tests.e2e.compare import comparable
from tests.e2e.conftest import MODEL, run_cases
from tests.e2e.corpus import cases
from tests.support.deployment import Deployment
from tests.support.wire import Answer, metric

_HITS = "vllm:external_prefix_cache_hits_total"


def test_at_least_sixty_prompts_are_compared() -> None:
    """The promise of the comparison is its breadth."""
    wanted = cases(MODEL)
    assert len(wanted) >= 60
    assert len({c.name for c in wanted}) == len(wanted)
    assert sum(c.streamed for c in wanted) >= 25


def test_answers_equal_the_aggregated_engines_and_the_kv_came_from_prefill(
    shape: Deployment, aggregated: dict[str, Answer]
) -> None:
    """Text, usage, finish reasons and framing are equal, and decode's own counters saw each prompt's KV arrive."""
    wanted = cases(MODEL)
    hits_before = sum(metric(m, _HITS) for m in shape.engine_metrics("decode"))
    answers = run_cases(shape.url, wanted)
    different = {
        c.name: (
            comparable(answers[c.name], streamed=c.streamed),
            comparable(aggregated[c.name], streamed=c.streamed),
        )
        for c in wanted
        if comparable(answers[c.name], streamed=c.streamed) != comparable(aggregated[c.name], streamed=c.streamed)
    }
    assert different == {}
    for case in wanted:
        theirs, ours = aggregated[case.name].headers, answers[case.name].headers
        assert ours["content-type"] == theirs["content-type"], case.name
        assert ours["x-disagg-path"] == "disaggregated", (case.name, ours)
    _check_every_prompt_was_fetched(shape, wanted_tokens=_prompt_tokens(aggregated), hits_before=hits_before)
    _check_all_instances_took_part(shape, answers)


def _prompt_tokens(aggregated: dict[str, Answer]) -> list[int]:
    counts: list[int] = []
    for case in cases(MODEL):
        if not case.streamed:
            counts.append(aggregated[case.name].json()["usage"]["prompt_tokens"])
        else:
            usages = [e["usage"] for e in aggregated[case.name].events()[:-1] if e.get("usage")]
            counts.extend(u["prompt_tokens"] for u in usages)
    return counts


def _check_every_prompt_was_fetched(shape: Deployment, *, wanted_tokens: list[int], hits_before: float) -> None:
    """Decode fetched at least the prompts whose lengths the answers tell, but for the last token of each."""
    hits = sum(metric(m, _HITS) for m in shape.engine_metrics("decode")) - hits_before
    assert hits >= sum(n - 1 for n in wanted_tokens)


def _check_all_instances_took_part(shape: Deployment, answers: dict[str, Answer]) -> None:
    for stage in ("prefill", "decode"):
        served = {a.headers[f"x-disagg-{stage}"] for a in answers.values()}
        assert served == {f"{stage}-{i}" for i in range(len(shape.engines[stage]))}
