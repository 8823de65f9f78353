"""Pages of several processes in Prometheus' text format, made into one."""

from __future__ import annotations

from collections.abc import Iterable

ALIKE = frozenset({"disagg_stage_ready", "disagg_engine_info", "disagg_engine_state", "disagg_breaker_state"})
"""Gauges that each process shows for the same thing: the highest counts. All other samples are added up."""


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """One page with the samples of all; families and samples keep the order in which they came first."""
    families: dict[bytes, dict[bytes, float]] = {}
    heads: dict[bytes, list[bytes]] = {}
    for page in pages:
        name = b""
        for line in page.splitlines():
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
                head = heads.setdefault(name, [])
                if line not in head:
                    head.append(line)
                families.setdefault(name, {})
            elif line:
                sample, _, value = line.rpartition(b" ")
                _add(families.setdefault(name, {}), name, sample, float(value))
    lines: list[bytes] = []
    for name, samples in families.items():
        lines += heads.get(name, ())
        lines += [b"%b %b" % (sample, repr(value).encode("ascii")) for sample, value in samples.items()]
    return b"\n".join([*lines, b""])


def _add(samples: dict[bytes, float], family: bytes, sample: bytes, value: float) -> None:
    before = samples.get(sample)
    if before is None:
        samples[sample] = value
    else:
        samples[sample] = max(before, value) if family.decode("ascii") in ALIKE else before + value
