"""Disaggregation is invisible: every shape answers as one aggregated engine does, and really hands KV over."""

from __future__ import annotations

from tests.e2e.compare import comparable, same
from tests.e2e.conftest import MODEL, run_cases
from tests.e2e.corpus import cases
from tests.support.deployment import Deployment
from tests.support.wire import Answer, metric

_HITS = "vllm:external_prefix_cache_hits_total"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"


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
    before = _decode_counters(shape)
    answers = run_cases(shape.url, wanted)
    different = {}
    for case in wanted:
        ours = comparable(answers[case.name], streamed=case.streamed)
        theirs = comparable(aggregated[case.name], streamed=case.streamed)
        if not same(ours, theirs):
            different[case.name] = (ours, theirs)
    assert different == {}
    for case in wanted:
        theirs, ours = aggregated[case.name].headers, answers[case.name].headers
        assert ours["content-type"] == theirs["content-type"], case.name
        assert ours["x-disagg-path"] == "disaggregated", (case.name, ours)
    _check_every_prompt_was_fetched(shape, wanted_tokens=_prompt_tokens(aggregated), before=before)
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


def _decode_counters(shape: Deployment) -> dict[str, float]:
    pages = shape.engine_metrics("decode")
    return {
        "hits": sum(metric(m, _HITS) for m in pages),
        "transferred": sum(metric(m, _BY_SOURCE, source="external_kv_transfer") for m in pages),
        "computed": sum(metric(m, _BY_SOURCE, source="local_compute") for m in pages),
    }


def _check_every_prompt_was_fetched(shape: Deployment, *, wanted_tokens: list[int], before: dict[str, float]) -> None:
    """Decode fetched the prompts whose lengths the answers tell, and computed none of them itself.

    A prompt of one token is the exception: decode always computes a prompt's last token, so it has nothing to fetch.
    """
    rise = {name: value - before[name] for name, value in _decode_counters(shape).items()}
    assert rise["transferred"] >= sum(wanted_tokens)
    assert rise["hits"] >= sum(wanted_tokens)
    assert rise["computed"] == sum(n for n in wanted_tokens if n == 1)


def _check_all_instances_took_part(shape: Deployment, answers: dict[str, Answer]) -> None:
    for stage in ("prefill", "decode"):
        served = {a.headers[f"x-disagg-{stage}"] for a in answers.values()}
        assert served == {f"{stage}-{i}" for i in range(len(shape.engines[stage]))}
