"""The page of the catalogue is made from the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from disagg.catalog import reference
from disagg.catalog.accelerator_file import accelerator_from
from disagg.catalog.accelerators import accelerators
from disagg.catalog.models import model_entries

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    """Run `python -m disagg.catalog.reference` after changing the data."""
    assert (ROOT / reference.PAGE).read_text(encoding="utf-8") == reference.make_page()


def test_the_page_has_every_entry_and_source() -> None:
    """Each model has its repository, each device the sources of its figures."""
    text = reference.make_page()
    assert all(f"`{entry.repository}`" in text for entry in model_entries().values())
    assert all(device.memory.source in text and f"**{name}**" in text for name, device in accelerators().items())


def test_the_page_is_written_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` says what is stale and writes nothing; without it the page is written once."""
    monkeypatch.chdir(tmp_path)
    assert reference.main(["--check"]) == 1
    assert not reference.PAGE.exists()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    assert "wrote" in capsys.readouterr().out


def test_the_example_of_the_page_is_a_device() -> None:
    """What the page shows as a description of a device can be read."""
    block = reference.make_page().split("```yaml\n")[1].split("```")[0]
    device = accelerator_from(yaml.safe_load(block), name="example", where="page")
    assert device.scale_out is not None
    assert device.scale_out.bandwidth.value == 50e9
