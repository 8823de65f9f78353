"""`disagg route` and `disagg keys`: flags, files, and what is printed."""

import json
from pathlib import Path

import pytest

from disagg.cli.main import main
from disagg.cli.route import load
from disagg.errors import ConfigError
from disagg.router.key_file import key_digest, parse_keys
from disagg.topology.flags import flag_table
from disagg.topology.fleet_file import FleetFile, load_fleet
from disagg.topology.spec import Stage
from disagg.topology.yaml_source import read_yaml

ENGINES = ["--prefill", "http://a:1", "--decode", "http://b:1"]


def test_urls_come_with_commas_blanks_or_repeated_flags() -> None:
    """As users of other routers write them; a number behind a URL is its bootstrap port."""
    words = ["--model", "m", "--prefill", "http://a:1,http://b:1", "--prefill", "http://c:1", "8998", "--decode"]
    file = load([*words, "http://d:1", "http://e:1"], None).file
    assert [(e.url, e.bootstrap_port) for e in file.endpoints(Stage.PREFILL)] == [
        ("http://a:1", None), ("http://b:1", None), ("http://c:1", 8998),
    ]  # fmt: skip
    assert [e.url for e in file.endpoints(Stage.DECODE)] == ["http://d:1", "http://e:1"]


def test_flags_win_over_the_file_and_both_name_their_problems(tmp_path: Path) -> None:
    """Everything that is wrong is told at once, each with its flag or its line."""
    path = tmp_path / "r.yaml"
    path.write_text("model: m\ndecode: http://x:1\nport: 1\nrouter: {retries: 3}\n")
    file = load(["--port", "9", "--retries", "0"], str(path)).file
    assert (file.port, file.router.retries) == (9, 0)
    path.write_text("modell: m\ndecode: http://x:1\n")
    with pytest.raises(ConfigError) as caught:
        load(["--retires", "1", "--max-queue", "x"], str(path))
    told = "\n".join(map(str, caught.value.problems))
    assert "--retires: unknown flag; did you mean --retries?" in told
    assert "--max-queue: expected a whole number" in told
    assert "modell: unknown key; did you mean model?" in told


def test_every_router_setting_has_its_flag() -> None:
    """The same flags as `disagg serve` has for the router."""
    ours = {f.names for f in flag_table(FleetFile) if f.field.path.startswith("router.")}
    serve = {f.names for f in flag_table() if f.field.path.startswith("router.")}
    assert ours == serve


def test_print_config_is_a_file_that_loads_back(capsys: pytest.CaptureFixture[str]) -> None:
    """What flags say becomes the file; secrets do not."""
    words = ["--model", "m", *ENGINES, "--retries", "1", "--lease-s", "7.5"]
    assert main(["route", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert load_fleet(read_yaml(text, name="r")).file == load(words, None).file
    assert main(["route", *words, "--api-key", "hush", "--print-config", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hush" not in out
    assert json.loads(out)["sources"]["model"] == "flag --model"


def test_dry_run_names_every_engine_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are those that metrics and headers will have."""
    assert main(["route", "--model", "m", *ENGINES, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "prefill-0 at http://a:1" in out
    assert "decode-0 at http://b:1" in out


def test_without_engines_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a new user types."""
    assert main(["route"]) == 2
    assert "--prefill URL --decode URL" in capsys.readouterr().err


def test_a_new_key_is_shown_once_with_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the hash of exactly this key."""
    assert main(["keys", "new", "--name", "alice", "--max-concurrent", "8"]) == 0
    _, key, _, line = (text.strip() for text in capsys.readouterr().out.splitlines())
    (entry,) = parse_keys(line, "k")
    assert (entry.name, entry.max_concurrent, entry.digest) == ("alice", 8, key_digest(key.encode()))
    assert key not in line


def test_wrong_limits_of_a_key_and_listing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A limit that is no number is refused; a list shows names and limits, no hashes."""
    assert main(["keys", "new", "--name", "a", "--max-concurrent", "many"]) == 2
    assert "max_concurrent= needs a whole number" in capsys.readouterr().err
    path = tmp_path / "keys"
    path.write_text(f"bob sha256:{'0' * 64} max_concurrent=2\n")
    assert main(["keys", "list", str(path)]) == 0
    assert capsys.readouterr().out == "bob max_concurrent=2\n"


def test_the_example_file_loads() -> None:
    """What the guide shows can be started with."""
    example = Path(__file__).parents[3] / "examples/route.yaml"
    assert load([], str(example)).file.stages() == (Stage.PREFILL, Stage.DECODE)


def test_a_bad_url_is_the_only_thing_that_is_said_of_its_list() -> None:
    """A list that has one engine, whose URL is wrong, is not called empty as well."""
    with pytest.raises(ConfigError) as caught:
        load(["--model", "m", "--prefill", "http://a:1", "--decode", "http://b:99999"], None)
    assert len(caught.value.problems) == 1
    assert "is no URL" in str(caught.value)


def test_files_of_keys_and_the_address_of_traces_are_checked_beside_the_rest(tmp_path: Path) -> None:
    """Nothing of this waits for the start: a dry run says it, all at once."""
    keys = tmp_path / "keys.txt"
    keys.write_text("alice sha256:12\nbob\n")
    words = ["--model", "m", *ENGINES, "--api-key-file", str(keys), "--engine-api-key-file", str(tmp_path / "none")]
    with pytest.raises(ConfigError) as caught:
        load([*words, "--admin-port", "9", "--admin-key-file", str(tmp_path / "gone"), "--port", "8000"], None)
    told = "\n".join(map(str, caught.value.problems))
    assert f"{keys}:1" in told
    assert f"{keys}:2" in told
    assert "--engine-api-key-file" in told
    assert "--admin-key-file" in told
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError) as traced:
        load(["--model", "m", *ENGINES, "--otlp-traces-endpoint", "foo"], None)
    assert "--otlp-traces-endpoint: 'foo' is no URL such as http://127.0.0.1:4318/v1/traces" in str(traced.value)
