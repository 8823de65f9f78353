"""The page of all metrics is made from the metrics."""

from pathlib import Path

import pytest

from disagg.router import reference

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    """Run `python -m disagg.router.reference` after changing a metric."""
    assert (ROOT / reference.PAGE).read_text(encoding="utf-8") == reference.make_page()


def test_metrics_are_named_as_prometheus_wants_it() -> None:
    """Our prefix, base units, no name twice; a sentence for each."""
    series = reference.every_series()
    assert len({s.name for s in series}) == len(series)
    for s in series:
        assert s.name.startswith("disagg_")
        assert not s.name.endswith(("_total", "_ms", "_milliseconds"))
        assert s.kind != "histogram" or s.name.endswith("_seconds")
        assert s.text.endswith(".")
        assert "instance" not in s.labels, "Prometheus has its own meaning for it"


def test_check_says_that_a_page_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writing makes it current."""
    monkeypatch.setattr(reference, "PAGE", tmp_path / "metrics.md")
    assert reference.main(["--check"]) == 1
    assert "python -m disagg.router.reference" in capsys.readouterr().out
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
