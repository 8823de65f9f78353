"""The topology as a file that says where each value came from."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cli.flags import build_topology
from disagg.cli.print_config import config_json, config_yaml, flow
from disagg.topology.load import load_topology
from disagg.topology.provenance import DEFAULT, Origin, OriginKind
from disagg.topology.spec import Platform
from disagg.topology.yaml_source import read_yaml
from tests.unit.cli.flag_tables import TABLES, build


def test_each_line_says_where_its_value_came_from(tmp_path: Any) -> None:
    """Flags, lines of a file, defaults, and what follows from other values."""
    path = tmp_path / "t.yaml"
    path.write_text("model: m\nplatform: emulated\nprefill:\n  engine_args: {dtype: float32}\nlink: {lease_s: 20}\n")
    loaded = build("--decode-device-group", "0,1", "2", "--max-num-seqs", "4", pair=False, config=str(path))
    lines = [line.strip() for line in config_yaml(loaded).splitlines()]
    for expected in (
        f"model: m  # {path}:1",
        "max_num_seqs: 4  # flag --max-num-seqs",
        'device_groups: ["0,1", "2"]  # flag --decode-device-group',
        "# replicas: 2  # derived from decode.device_groups",
        "# replicas: 1  # default",
        "# ports: [9800, 9801]  # derived from the default first port of the stage",
        "# max_num_seqs: 4  # derived from max_num_seqs",
        f"dtype: float32  # {path}:4",
        f"lease_s: 20.0  # {path}:5",
        "# on_failure: recompute  # default",
        "# router:",
        "# strict: false  # default",
    ):
        assert expected in lines
    assert lines[0].startswith("# disagg topology, 1P2D.")
    assert all("#" in line for line in lines if not line.endswith(":"))


def test_auto_shows_what_it_stands_for() -> None:
    """The file keeps auto, so that it runs elsewhere too."""
    assert "# platform: cpu  # derived from this machine" in config_yaml(build())


def test_an_empty_pool_stays_a_pool() -> None:
    """{} is a pool with defaults; a key without a value would be an error."""
    loaded = load_topology(read_yaml("model: m\nprefill: {}\ndecode: {}\n", name="t.yaml"), auto=Platform.CPU)
    text = config_yaml(loaded)
    assert "prefill: {}  # t.yaml:2\n" in text
    assert load_topology(read_yaml(text, name="x"), auto=Platform.CPU).topology == loaded.topology


def test_a_file_name_cannot_break_out_of_its_comment(tmp_path: Any) -> None:
    """A line break in a path would otherwise become part of the file."""
    path = tmp_path / "a\nport: 1\n.yaml"
    path.write_text("model: m\nprefill: {replicas: 1}\ndecode: {replicas: 1}\n")
    loaded = build(pair=False, config=str(path))
    assert load_topology(read_yaml(config_yaml(loaded), name="x"), auto=Platform.CPU).topology == loaded.topology


def test_the_json_report_holds_the_same() -> None:
    """For programs: what was given, its sources, defaults and derived values."""
    report = json.loads(config_json(build("--decode-port", "9811", "--env", "A=1")))
    assert report["topology"] == {
        "model": "m",
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1, "ports": [9811]},
        "env": {"A": "1"},
    }
    assert report["shape"] == "1P1D"
    assert report["sources"]["decode.ports"] == "flag --decode-port"
    assert report["defaults"]["router.strict"] is False
    assert report["derived"]["prefill.ports"]["value"] == [9900]
    assert "encode.parallel.tensor" not in report["defaults"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=300), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=300), _JSON))
def test_any_value_on_one_line_is_read_back(value: dict[str, Any]) -> None:
    """By our reader and, for the structure, by any YAML reader."""
    text = f"v: {flow(value)}"
    assert "\n" not in text
    document = read_yaml(text, name="t")
    assert document.data == {"v": value}
    assert document.problems == ()
    assert isinstance(yaml.safe_load(text)["v"], dict)


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-")
)
_ENGINE_FLAGS = st.lists(
    st.sampled_from(
        [
            ["--dtype", "float32"],
            ["--no-enable-prefix-caching"],
            ["--lora-modules", "a=b", "c"],
            ["--compilation-config", '{"a": [1, {"b": null}]}'],
            ["--compilation-config.x.y", "1.5"],
            ["--gpu-memory-utilization", "1e-7"],
        ]
    ),
    max_size=3,
)


@st.composite
def _command_lines(draw: st.DrawFn) -> list[str]:
    words = [f"--model={draw(_TEXT)}", "--platform", "emulated"]
    words += ["--port", str(draw(st.integers(1, 5000))), "--link-lease-s", str(draw(st.floats(0.1, 1000)))]
    for stage in ("prefill", "decode", *draw(st.sets(st.sampled_from(["encode", "colocated"])))):
        size = draw(st.integers(1, 3))
        if draw(st.booleans()):
            words += [f"--{stage}-device-group", *draw(st.lists(_groups(), min_size=size, max_size=size))]
        else:
            words += [f"--{stage}-replicas", str(size)]
        words += [f"--{stage}-env", f"A={draw(_TEXT)}", f"--{stage}-tp", str(draw(st.integers(1, 9)))]
        settings_text = json.dumps(draw(st.dictionaries(_TEXT, _JSON, max_size=2)))
        words += [f"--{stage}-override-qaic-config", settings_text]
        for flag in draw(_ENGINE_FLAGS):
            words += [flag[0].replace("--", f"--{stage}-", 1), *flag[1:]]
    for flag in draw(_ENGINE_FLAGS):
        words += flag
    words += draw(st.sampled_from([[], ["-vv"], ["--strict"], ["--served-model-name", "a", "true"], ["--seed", "0"]]))
    return words


def _groups() -> st.SearchStrategy[str]:
    # Ids of different instances must differ, so each draw takes a number that no other one has.
    return st.uuids().map(lambda u: str(u.int % 1_000_000))


@settings(max_examples=60, deadline=None)
@given(_command_lines())
def test_what_flags_say_the_printed_file_says(words: list[str]) -> None:
    """Flags, printed and loaded again, are the same topology, with the same fields given."""
    loaded = build_topology(words, flag_tables=TABLES)
    text = config_yaml(loaded)
    again = load_topology(read_yaml(text, name="again.yaml"), auto=Platform.CPU)
    assert again.topology == loaded.topology
    assert again.topology.model_fields_set == loaded.topology.model_fields_set
    assert json.loads(config_json(again))["topology"] == json.loads(config_json(loaded))["topology"]
    given_values = json.loads(config_json(loaded))["topology"]
    assert load_topology(read_yaml(json.dumps(given_values), name="j"), auto=Platform.CPU).topology == loaded.topology


def test_origins_read_as_sentences() -> None:
    """The words behind each value."""
    assert str(Origin(OriginKind.FLAG, "--port")) == "flag --port"
    assert str(Origin(OriginKind.FILE, "t.yaml:3")) == "t.yaml:3"
    assert str(Origin(OriginKind.DERIVED, "ports")) == "derived from ports"
    assert str(DEFAULT) == "default"
