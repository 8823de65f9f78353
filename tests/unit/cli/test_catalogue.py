"""`disagg models`, `disagg accelerators` and `disagg calibrate-host`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.catalog.accelerators import accelerators, find_accelerator
from disagg.catalog.figure import Origin
from disagg.catalog.models import model_entries
from disagg.cli import calibrate_host
from disagg.cli.main import main
from disagg.errors import PreparationError
from disagg.launch import host_speed
from disagg.launch.host_speed import HostSpeed


def test_models_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry is in the list, also in a narrow terminal."""
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in model_entries())


def test_a_model_shows_where_its_figures_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    """Source, parts, layers and what was published are in the detail view."""
    assert main(["models", "moonshotai/Kimi-K2.5"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("moonshotai/Kimi-K2.5 config.json", "60 x MLA 64 x (512 + 64)", "384 experts", "arXiv 2507.20534"):
        assert text in out


def test_models_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has one object for a model, a list for all, with whole numbers of parameters."""
    assert main(["models", "llama-3.1-8b", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["parameters"], one["blocks"][0]["attention"]["kind"]) == (8_030_261_248, "SoftmaxAttention")
    assert main(["models", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["models"]) == len(model_entries())


def test_a_file_cannot_disturb_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration with control characters is refused, or shown without them."""
    config = dict(model_entries()["llama-3.1-8b"].config) | {"model_type": "\x1b[31mred"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["models", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_accelerators_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Every device is in the list, whole."""
    assert main(["accelerators"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in accelerators())
    assert "…" not in out


def test_an_accelerator_shows_the_source_of_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has a value, its origin and the number of a source that is printed below."""
    assert main(["accelerators", "mi300x"]) == 0
    out = capsys.readouterr().out
    assert "1307.4 TFLOP/s  catalogue" in out
    assert "[1] AMD Instinct MI300X data sheet" in out
    assert "default" in out


def test_the_json_of_a_device_is_its_description(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be saved, edited and given back as a device."""
    assert main(["accelerators", "b200", "--json"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert find_accelerator(str(tmp_path / "mine.json")) == find_accelerator("b200")
    assert main(["accelerators", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["accelerators"]) == len(accelerators())


@pytest.mark.parametrize("words", [["models", "lama-3.1-8b"], ["accelerators", "h1000"]])
def test_an_unknown_name_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong name is the user's error, told with the nearest names."""
    assert main(words) == 2
    assert "Near it" in capsys.readouterr().err


def measured(threads: int, seconds: float) -> HostSpeed:
    return HostSpeed(threads, 1e10 * threads, None, 5e9 * threads, 4e9 * threads, f"NumPy, {seconds} s")


def test_calibration_writes_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that it writes is a device of measured figures, with every number of threads in its notes."""
    monkeypatch.setattr(calibrate_host, "measure", measured)
    monkeypatch.setattr(calibrate_host, "usable_threads", lambda: 6)
    file = tmp_path / "host.yaml"
    assert main(["calibrate-host", "--threads", "6", "--output", str(file), "--quick"]) == 0
    device = find_accelerator(str(file))
    assert (device.bandwidth.value, device.bandwidth.origin) == (30e9, Origin.MEASURED)
    assert [note.split()[0] for note in device.notes] == ["1", "2", "4", "6"]
    assert str(file) in capsys.readouterr().out
    assert main(["calibrate-host", "--output", str(file)]) == 2, "it is there already"
    assert main(["calibrate-host", "--threads", "1", "--output", str(file), "--force", "--json"]) == 0
    assert [row["threads"] for row in json.loads(capsys.readouterr().out)["by_threads"]] == [1]


def test_wrong_flags_of_calibration_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured before the flags are right."""
    assert main(["calibrate-host", "--threads", "0", "--output", str(tmp_path / "host.txt")]) == 2
    assert "2 problems" in capsys.readouterr().err
    assert main(["calibrate-host", "--output", str(tmp_path / "absent" / "host.yaml")]) == 2


def test_one_measurement_in_earnest() -> None:
    """One thread multiplies, copies and reads at rates that a processor can have."""
    speed = host_speed.measure(1, 0.01, 16)
    assert speed.threads == 1
    assert 1e7 < speed.fp32 < 1e13
    assert 1e7 < speed.copy < 1e13
    assert 1e7 < speed.read < 1e13


def test_a_failed_measurement_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of the process that failed is the reason that the user gets."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(PreparationError, match="with 1 threads failed"):
        host_speed.measure(1, 0.01)
