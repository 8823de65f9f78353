"""Where one figure of a projection comes from."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.errors import ConfigError, Problem
from disagg.project.result import Projection
from disagg.topology.messages import nearest

# Short names that users have for figures.
_SHORT = {
    "ttft": "ttft_ms",
    "itl": "itl_ms",
    "tpot": "tpot_ms",
    "e2e": "request_latency_ms",
    "throughput": "decode_throughput_tps",
    "limit": "limiting_pool",
}


def explain(projection: Projection, name: str) -> list[str]:
    """A figure, how it is made, its parts, and what the numbers rest on, one line each.

    Args:
        projection: Where it is.
        name: A figure's name, or one of ttft, itl, tpot, e2e, throughput, limit.

    Raises:
        ConfigError: If there is no such figure, with the nearest name.
    """
    full = _SHORT.get(name, name)
    quantity = projection.figures.get(full)
    if quantity is None:
        known = [*_SHORT, *projection.figures]
        guess = nearest(name, known)
        advice = f"did you mean {guess}?" if guess else f"known are {', '.join(known)}"
        raise ConfigError([Problem("--explain", f"there is no figure {name}; {advice}")])
    value = f"{quantity.value:.6g}" if isinstance(quantity.value, float) else str(quantity.value)
    lines = [f"{full} = {value} {quantity.unit}".rstrip(), f"  how: {quantity.how}", f"  rests on: {quantity.basis}"]
    for title, parts in _parts(projection, full):
        lines.append(f"  {title}:")
        lines += [f"    {part:<28} {ms:>12.4f} ms" for part, ms in parts.items() if ms]
    if full == "limiting_pool":
        lines.append(f"  {projection.limit}")
    lines.append("  figures and defaults that took part:")
    lines += [f"    {note}" for note in projection.notes]
    return lines


def _parts(projection: Projection, name: str) -> list[tuple[str, Mapping[str, float]]]:
    step = ("a decode step", projection.decode_step)
    prompt = ("one prompt alone", projection.prefill)
    by_name: dict[str, list[tuple[str, Mapping[str, float]]]] = {
        "ttft_ms": [("what the first token waits for", projection.first_token), prompt],
        "prefill_compute_ttft_ms": [prompt],
        "prefill_throughput_tps": [prompt],
        "request_latency_ms": [("what the first token waits for", projection.first_token), step],
    }
    stepwise = {"itl_ms", "tpot_ms", "decode_step_latency_ms", "pure_step_latency_ms", "decode_throughput_tps"}
    return by_name.get(name, [step] if name in stepwise else [])
