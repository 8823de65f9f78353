"""Fields, flags, schema and reference page are one description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.topology import reference
from disagg.topology.fields import Kind, children, field_of, spec_fields
from disagg.topology.flags import flag_table, flags_by_name, flags_of
from disagg.topology.schema import make_schema, shipped_schema
from disagg.topology.spec import Stage

ROOT = Path(__file__).parents[3]


def test_every_field_says_what_it_does() -> None:
    """The docstring of a field is its help text and its line in the reference."""
    silent = [f.path for f in spec_fields().values() if len(f.doc) < 10 or not f.doc.endswith(".")]
    assert silent == []


def test_every_field_has_a_flag() -> None:
    """Whatever the file can say, the command line can."""
    without = [f.path for f in spec_fields().values() if f.kind is not Kind.SECTION and not flags_of(f.path)]
    assert sorted(without) == ["colocated.engine_args", "decode.engine_args", "encode.engine_args", "engine_args",
                               "prefill.engine_args"]  # fmt: skip


def test_no_two_flags_share_a_spelling() -> None:
    """`--prefill-policy` is the router's, and nothing of the prefill pool may take it."""
    assert len(flags_by_name()) == sum(len(f.names) for f in flag_table())
    assert flags_by_name()["prefill-policy"].path == ("router", "prefill_policy")
    assert flags_by_name()["kv-handOff-port"].path == ("link", "handoff_port")


@pytest.mark.parametrize("stage", list(Stage))
def test_each_stage_has_the_twins(stage: Stage) -> None:
    """Encode and colocated have every flag that prefill and decode have."""
    tails = {f.path.removeprefix("prefill.") for f in spec_fields().values() if f.path.startswith("prefill.")}
    mine = {f.path.removeprefix(f"{stage}.") for f in spec_fields().values() if f.path.startswith(f"{stage}.")}
    assert mine == tails
    assert f"{stage}-device-group" in flags_by_name()
    assert f"{stage}-tp" in flags_by_name()


def test_a_path_leads_to_its_field() -> None:
    """Items of lists and entries of mappings belong to the field that holds them."""
    found = field_of("prefill.ports.3")
    assert found is not None
    assert found.path == "prefill.ports"
    entry = field_of("engine_args.compilation-config.level")
    assert entry is not None
    assert entry.path == "engine_args"
    assert field_of("nothing.here") is None
    assert "lease_s" in children("link")


def test_the_shipped_schema_is_current() -> None:
    """Run `python -m disagg.topology.reference` after changing the specs."""
    assert shipped_schema() == make_schema()


def test_the_schema_describes_the_shorthands() -> None:
    """An editor must not complain about what the loader accepts."""
    schema = json.loads(make_schema())
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False
    pool = schema["$defs"]["Pool"]["properties"]
    assert {"type": "string"} in pool["ports"]["anyOf"]
    assert {"type": "integer"} in pool["device_groups"]["anyOf"]
    assert pool["max_num_seqs"]["description"].startswith("Batch")


def test_the_reference_page_is_current() -> None:
    """Run `python -m disagg.topology.reference` after changing the specs."""
    assert (ROOT / reference.PAGE).read_text(encoding="utf-8") == reference.make_page()


def test_check_finds_a_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI sees a stale file; a run writes both, and a second run writes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / reference.SCHEMA).parent.mkdir(parents=True)
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert capsys.readouterr().out.count("wrote") == 2
    assert reference.main(["--check"]) == 0
    (tmp_path / reference.PAGE).write_text("old")
    assert reference.main(["--check"]) == 1
