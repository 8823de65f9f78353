"""Reading a topology file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.topology.yaml_source import MAX_BYTES, read_yaml, read_yaml_file


def _refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, name="t.yaml")
    return str(caught.value.problems[0])


def test_every_value_knows_its_line() -> None:
    """Scalars, list items and mappings are found again by path, the first line being 1."""
    document = read_yaml("model: m\nprefill:\n  ports:\n  - 1\n  - 2\n  env: {A: x}\n", name="t.yaml")
    assert document.data == {"model": "m", "prefill": {"ports": [1, 2], "env": {"A": "x"}}}
    assert document.values["model"].text == "t.yaml:1"
    assert document.values["prefill.ports"].text == "t.yaml:3"
    assert document.values["prefill.ports.1"].text == "t.yaml:5"
    assert document.values["prefill.env.A"].text == "t.yaml:6"
    assert document.containers["prefill"].text == "t.yaml:3"
    assert document.problems == ()


def test_scalars_follow_yaml_1_2() -> None:
    """Words and numbers that YAML 1.1 would surprise with stay what they look like."""
    text = "a: no\nb: on\nc: 010\nd: 1:30\ne: 2020-01-01\nf: 0..15\ng: 0,1\nh: 1_000\ni: 0x10\nj: .inf\nk: 1e999999\n"
    data = read_yaml(text, name="t").data
    assert {k: v for k, v in data.items() if k != "k"} == {
        "a": "no", "b": "on", "c": "010", "d": "1:30", "e": "2020-01-01", "f": "0..15", "g": "0,1",
        "h": "1_000", "i": "0x10", "j": ".inf",
    }  # fmt: skip
    text = "a: true\nb: False\nc: -3\nd: 1.5\ne: 1e3\nf: null\ng: ~\nh:\ni: '1'\nj: !!str 1\nk: !!int '7'\n"
    assert read_yaml(text, name="t").data == {
        "a": True, "b": False, "c": -3, "d": 1.5, "e": 1000.0, "f": None, "g": None, "h": None,
        "i": "1", "j": "1", "k": 7,
    }  # fmt: skip


def test_duplicate_keys_are_errors_that_name_both_lines() -> None:
    """PyYAML would silently keep the last one."""
    document = read_yaml("model: a\nport: 1\nmodel: b\nprefill:\n  env: {A: x, A: y}\n", name="t.yaml")
    assert [str(p) for p in document.problems] == [
        "t.yaml:3: model: is given twice, first in line 1; remove one",
        "t.yaml:5: prefill.env.A: is given twice, first in line 5; remove one",
    ]


def test_aliases_and_merge_keys_work() -> None:
    """A pool may be written once and refined; its own keys win over merged ones."""
    text = "prefill: &p\n  max_num_seqs: 1\n  block_size: 16\ndecode:\n  <<: *p\n  max_num_seqs: 4\nencode: *p\n"
    document = read_yaml(text, name="t")
    assert document.data["decode"] == {"max_num_seqs": 4, "block_size": 16}
    assert document.data["encode"] == {"max_num_seqs": 1, "block_size": 16}
    assert document.values["decode.block_size"].text == "t:3"
    assert document.problems == ()


def test_a_merge_of_something_else_is_an_error() -> None:
    """<< takes a mapping."""
    assert "<< takes an alias of a mapping" in str(read_yaml("a:\n  <<: 3\n", name="t").problems[0])


def test_a_few_lines_cannot_stand_for_billions_of_values() -> None:
    """Nested aliases are cut off by the number of values that they stand for."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "stands for more than" in _refused("\n".join(lines))


def test_merge_keys_cannot_multiply_without_limit() -> None:
    """Merging counts like any other use of an alias."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    assert "stands for more than" in _refused("\n".join(lines))


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a\n  <<: *a\n"])
def test_an_alias_cannot_contain_itself(text: str) -> None:
    """A loop is an error, not an endless walk."""
    assert "the value that contains it" in _refused(text)


def test_deep_nesting_is_refused_before_it_recurses() -> None:
    """PyYAML's composer recurses; a thousand brackets must not reach it."""
    assert "levels deep" in _refused("a: " + "[" * 5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("null\n", "is empty"),
        ("- a\n- b\n", "t.yaml:1: expected a mapping of keys to values, got a list"),
        ("just words\n", "got the single value 'just words'"),
        ("a: [1\nb: 2\n", "t.yaml:2: is not valid YAML"),
        ("a: 1\n\tb: 2\n", "t.yaml:2: is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "t.yaml:2: is not valid YAML"),
        ("a: \x07\n", "is not valid YAML"),
        ("a: *missing\n", "undefined alias"),
    ],
)
def test_what_is_no_topology_is_refused_with_its_line(text: str, message: str) -> None:
    """Each way of being no YAML mapping has a message of its own."""
    assert message in _refused(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [a, b]\n: 1\n", "a key has to be a word"),
        ("~: 1\n", "a key has to be a word"),
        ("a: !!python/object:os.system x\n", "cannot be read as"),
        ("a: !thing {b: 1}\n", "tag !thing is not supported"),
        ("a: !!int x\n", "'x' cannot be read as int"),
        ("a: !!float .inf\n", "cannot be read as float"),
        ('a: "\\ud800"\n', "surrogate"),
    ],
)
def test_what_json_cannot_hold_is_a_problem_with_its_line(text: str, message: str) -> None:
    """Tags and odd keys are collected, and no object is ever made from a tag."""
    problems = read_yaml(text, name="t.yaml").problems
    assert len(problems) == 1
    assert message in str(problems[0])
    assert str(problems[0]).startswith("t.yaml:1")


def test_json_is_yaml_even_beyond_16_bits() -> None:
    """JSON escapes such characters as a pair, which PyYAML alone leaves apart."""
    assert read_yaml('{"model": "\\ud800\\udc00 m", "port": 1}', name="t").data == {
        "model": "\U00010000 m",
        "port": 1,
    }


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory, other bytes and a huge file are configuration errors with the path."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\n")
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (MAX_BYTES + 1))
    cases = {
        str(tmp_path / "none.yaml"): "no such file",
        str(tmp_path): "is a directory",
        str(binary): "is not UTF-8 text: byte 7 is 0xff",
        str(huge): "is larger than",
        "a\0b": "cannot be read",
        str(binary / "x"): "cannot be read",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            read_yaml_file(path)
        assert message in str(caught.value)
        assert caught.value.problems[0].where == path


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """Editors on some systems write one."""
    path = tmp_path / "t.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: m\n")
    assert read_yaml_file(str(path)).data == {"model": "m"}


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but a ConfigError comes out of the reader."""
    with contextlib.suppress(ConfigError):
        assert isinstance(read_yaml(text, name="t").data, dict)
