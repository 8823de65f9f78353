"""`disagg project`: from a command line to figures, and everything that is wrong at once."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

from disagg.cli.main import main

# The line of the published page on projecting a split, with a model, a device and a workload.
SEED = shlex.split(
    "--model llama-3.1-70b --accelerator h100-sxm --input-len 2048 --output-len 256 --max-concurrency 64 "
    "--disaggregate --prefill-tp 4 --prefill-ep 4 --prefill-replicas 1 --decode-tp 8 --decode-ep 8 "
    "--decode-replicas 2 --kv-transfer-bw-gbps 400"
)


def figures(
    capsys: pytest.CaptureFixture[str], *words: str, command: str = "project"
) -> dict[str, float | str | bool]:
    """Values of the figures by name."""
    assert main([command, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {name: figure["value"] for name, figure in found["figures"].items()}


def number(found: dict[str, float | str | bool], name: str) -> float:
    """A figure that is a number."""
    return float(found[name])


@pytest.mark.parametrize("command", ["project", "inference"])
def test_the_published_command_line_works_as_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both names; an expert-parallel size changes nothing for a model without experts."""
    found = figures(capsys, *SEED, command=command)
    assert found["is_disaggregated"] is True
    # 1 x 4 and 2 x 8 devices.
    assert (found["replica_gpus"], found["prefill_replica_gpus"], found["decode_replica_gpus"]) == (20, 4, 8)
    # 2048 tokens of 80 layers x 2 x 8 heads x 128 x 2 bytes, an eighth of it per rank, over 400 GiB/s.
    assert number(found, "kv_transfer_ms") == pytest.approx(2048 * 327_680 / 8 / (400 * 2**30) * 1e3)
    assert number(found, "ttft_ms") >= number(found, "prefill_compute_ttft_ms") + number(found, "kv_transfer_ms")
    assert (found["mixed_step_fraction_pct"], found["tpot_pollution_pct"], found["tpot_lift_pct"]) == (0, 0, 0)
    assert found["mixed_step_latency_ms"] == found["pure_step_latency_ms"]


def test_a_file_and_its_flags_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One description, projected and served."""
    path = tmp_path / "topology.yaml"
    path.write_text(
        "model: llama-3.1-70b\n"
        "prefill: {replicas: 1, parallel: {tensor: 4}}\n"
        "decode: {replicas: 2, parallel: {tensor: 8}}\n"
        "workload: {input_len: 2048, output_len: 256, max_concurrency: 64}\n"
        "projection: {accelerator: h100-sxm, kv_transfer_bw_gbps: 400}\n"
    )
    assert figures(capsys, "--config", str(path)) == figures(capsys, *SEED)
    assert number(figures(capsys, "--config", str(path), "--decode-replicas", "1"), "replica_gpus") == 12


def test_a_colocated_pool_shows_what_a_split_could_win_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Pollution and lift are two numbers, and longer prompts raise both."""
    base = ["--model", "llama-3.1-8b", "--accelerator", "h100-sxm", "--max-concurrency", "16", "--output-len", "256"]
    short = figures(capsys, *base, "--input-len", "512")
    long = figures(capsys, *base, "--input-len", "8192")
    assert short["is_disaggregated"] is False
    assert 0 < number(short, "tpot_lift_pct") < number(long, "tpot_lift_pct")
    assert number(short, "tpot_pollution_pct") < number(long, "tpot_pollution_pct") <= 100


def test_everything_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Model, device, shape and what is not carried out yet, each with its flag; exit code 2."""
    words = ["--model", "llama-3.1-70b", "--tp", "7", "--accelerator", "h100-sx", "--think-ms", "5"]
    assert main(["project", *words]) == 2
    told = capsys.readouterr().err
    assert "--accelerator: h100-sx is not in the catalogue. Near it: h100-sxm" in told
    assert "--tp: 7 ranks do not divide the 64 heads" in told
    assert "--think-ms: is not carried out by this version" in told


def test_a_model_that_does_not_fit_is_told_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    """131 GiB of weights on one device of 80."""
    assert main(["project", "--model", "llama-3.1-70b", "--accelerator", "h100-sxm"]) == 2
    assert "does not fit: needs 133.3 GiB per device" in capsys.readouterr().err


def test_serving_refuses_what_only_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that would change nothing is an error; in the file it may stand."""
    words = ["--model", "m", "--platform", "emulated", "--prefill-replicas", "1", "--decode-replicas", "1"]
    assert main(["serve", *words, "--input-len", "5", "--dry-run"]) == 2
    assert "--input-len: is for `disagg project`" in capsys.readouterr().err


def test_a_figure_is_explained_with_its_parts_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """Short names work; a wrong one is told with the nearest."""
    assert main(["project", *SEED, "--explain", "ttft"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ttft_ms = ")
    assert "first decode step" in out
    assert "aiconfigurator" in out
    assert main(["project", *SEED, "--explain", "ttfd"]) == 2
    assert "did you mean ttft?" in capsys.readouterr().err


def test_rows_for_a_spreadsheet_have_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """The same names and values as for machines."""
    found = figures(capsys, *SEED)
    assert main(["project", *SEED, "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {row["figure"] for row in rows} == set(found)
    assert {row["figure"]: row["value"] for row in rows}["ttft_ms"] == str(found["ttft_ms"])


ANCHOR = {
    "source": "by hand",
    "regime": {"model": "llama-3.1-8b", "accelerator": "h100-sxm"},
    "decode": [{"sequences": n, "context": c, "ms": 20.0} for n in (1, 64) for c in (512, 4096)],
    "prefill": [{"prompts": 1, "tokens": 1024, "ms": 50.0}],
}


def test_measured_step_times_replace_the_model_and_every_figure_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside their range they are measured, beyond it transported; without them modelled."""
    path = tmp_path / "anchors.json"
    path.write_text(json.dumps(ANCHOR))
    words = ["--model", "llama-3.1-8b", "--accelerator", "h100-sxm", "--disaggregate", "--json"]

    def run(*more: str) -> dict[str, dict[str, object]]:
        assert main(["project", *words, *more]) == 0
        found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["figures"]
        return found

    inside = run("--anchors", str(path), "--max-concurrency", "16")
    plain = run("--max-concurrency", "16")
    # Steps of 20 ms were measured all around, where the model says less than half of that.
    assert float(str(inside["decode_step_latency_ms"]["value"])) > 15 > float(str(plain["itl_ms"]["value"]))
    assert inside["decode_step_latency_ms"]["basis"] == "measured"
    assert run("--anchors", str(path), "--max-concurrency", "256")["itl_ms"]["basis"] == "transported"
    assert plain["itl_ms"]["basis"] == "modelled"
    aside = run("--anchors", str(path), "--profiling-mode", "simulate", "--max-concurrency", "16")
    assert aside == plain


def test_anchors_of_another_regime_and_a_missing_measurement_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what differs, and with the ways on."""
    path = tmp_path / "anchors.json"
    path.write_text(json.dumps(ANCHOR))
    assert main(["project", "--model", "llama-3.1-8b", "--accelerator", "h200-sxm", "--anchors", str(path)]) == 2
    assert "accelerator is h100-sxm there and h200-sxm here" in capsys.readouterr().err
    words = ["--model", "llama-3.1-8b", "--accelerator", "h200-sxm"]
    assert main(["project", *words, "--profiling-mode", "benchmark"]) == 2
    assert "--profiling-mode: benchmark needs measured step times" in capsys.readouterr().err
    assert main(["project", *words, "--anchors", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_report_fits_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred columns where there is no terminal, sentences wrapped."""
    assert main(["project", *SEED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("What one change would do" in line for line in lines)
