"""Shorthands of values."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.topology import forms


@pytest.mark.parametrize(
    ("text", "value"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2M", 2 * 2**20), ("1g", 10**9), (7, 7), ("x", "x"), (True, True)],
)
def test_whole_numbers_take_vllms_suffixes(text: object, value: object) -> None:
    """8k is 8000 and 8K is 8192; what has no suffix is left for the type check."""
    assert forms.whole_number(text) == value


def test_a_fraction_of_a_power_of_two_is_refused() -> None:
    """1.5K could mean 1536 or 1500; the message says how to write the latter."""
    with pytest.raises(ValueError, match=r"1\.5k"):
        forms.whole_number("1.5K")


@pytest.mark.parametrize("value", [9900, "9900", [9900]])
def test_one_port_may_stand_alone(value: object) -> None:
    """A pool of one instance needs no list."""
    assert forms.port_list(value) == (9900,)


def test_ports_of_several_instances_are_a_comma_list() -> None:
    """The spelling of Qualcomm's launcher, with and without spaces."""
    assert forms.port_list("9900,9901") == (9900, 9901)
    assert forms.port_list("9900, 9901") == (9900, 9901)
    assert forms.port_list("9900 9901") == (9900, 9901)


@pytest.mark.parametrize("text", ["", "9900,,9901", "0", "70000", "x", "9900;9901", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    """Ports are from 1 to 65535, and an empty place in a list is a mistake."""
    with pytest.raises(ValueError, match="not a port"):
        forms.port_list(text)


def test_groups_of_several_instances_are_separated_by_spaces() -> None:
    """`0,1 2,3` are two groups, while a space behind a comma separates nothing."""
    assert forms.group_list("0,1 2,3") == ("0,1", "2,3")
    assert forms.group_list("0, 1  2..3") == ("0,1", "2..3")
    assert forms.group_list(4) == (4,)


@pytest.mark.parametrize(("value", "text"), [(3, "3"), ([0, 1], "0,1"), ("0 .. 3", "0..3"), ("0,2", "0,2")])
def test_a_group_may_be_a_number_or_a_list(value: object, text: str) -> None:
    """YAML reads `0` as a number and `[0, 1]` as a list; both are groups."""
    assert forms.device_group(value) == text


@pytest.mark.parametrize("value", ["", "3..0", "0,0", "a", "0..", [], "0,,1"])
def test_a_wrong_group_is_refused(value: object) -> None:
    """Empty, reversed, repeated and unreadable groups do not get through."""
    with pytest.raises(ValueError, match=r"\w"):
        forms.device_group(value)


def test_both_spellings_of_compile_settings_are_one_record() -> None:
    """The text form and the JSON form give the same mapping, with the types that JSON has."""
    text = forms.qaic_config("split_retained_state_io:True mxfp6_matmul=true num_cores:10 dfs=False bare path:/a:b=c")
    assert text == {
        "split_retained_state_io": True,
        "mxfp6_matmul": True,
        "num_cores": 10,
        "dfs": False,
        "bare": True,
        "path": "/a:b=c",
    }
    assert forms.qaic_config(json.dumps(text)) == text


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("a:[0,1]", {"a": [0, 1]}),
        ("a:", {"a": True}),
        ("a:null", {"a": None}),
        ("a:-1", {"a": -1}),
        ("a:0,1", {"a": "0,1"}),
        ("a-b:X", {"a-b": "X"}),
        ("", {}),
    ],
)
def test_compile_settings_keep_what_the_adapter_normalises(text: str, record: dict[str, object]) -> None:
    """Names and letters stay as written: their meaning is the adapter's."""
    assert forms.qaic_config(text) == record


@pytest.mark.parametrize("text", [":True", "a:1 a=2", "[0, 1]", "a:[0, 1]", '{"a": 1, "a": 2}', "{a:1}", "=", "a:{x"])
def test_wrong_compile_settings_are_refused(text: str) -> None:
    """An item without a key, a repeated key and broken JSON are errors, not silently other settings."""
    with pytest.raises(ValueError, match=r"\w"):
        forms.qaic_config(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", '{"a": 1, "a": 1}', "{", "1" * 5000, "[" * 100_000])
def test_only_strict_json_is_read(text: str) -> None:
    """What another JSON reader would refuse or read otherwise is refused here, whatever its size."""
    with pytest.raises(ValueError, match=r"\w"):
        forms.parse_json(text)


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(), st.lists))
def test_json_comes_back_as_it_was(value: object) -> None:
    """Reading what json writes changes nothing."""
    assert forms.parse_json(json.dumps(value)) == value


@settings(deadline=None)
@given(st.text())
def test_no_text_breaks_a_reader(text: str) -> None:
    """Any text is read or refused with a ValueError; nothing else escapes."""
    for read in (forms.whole_number, forms.port_list, forms.group_list, forms.device_group, forms.qaic_config):
        with contextlib.suppress(ValueError):
            read(text)


@pytest.mark.parametrize("url", ["redis://h:1", "lmcache://h:1", "mooncake://h:1", "file:///d", "rediss://h"])
def test_known_stores_are_accepted(url: str) -> None:
    """The schemes that the reference lists."""
    assert forms.store_url(url) == url


@pytest.mark.parametrize("url", ["", "redis://", "http://h", "file://d", "h:1"])
def test_other_stores_are_refused(url: str) -> None:
    """A wrong scheme or a missing host is found before anything starts."""
    with pytest.raises(ValueError, match="not the URL of a store"):
        forms.store_url(url)


def test_numbers_in_an_environment_become_text() -> None:
    """`OMP_NUM_THREADS: 4` is what people write; true is not, since programs disagree about it."""
    assert forms.env_value(4) == "4"
    assert forms.env_value(True) is True


@pytest.mark.parametrize("value", ["a\nb", "a\0", "\x1b[31m", "--evil", "-", "\x9b"])
def test_a_name_can_stand_on_an_engines_command_line(value: str) -> None:
    """A NUL cuts an argument short, an escape colours the terminal, a dash makes a flag of a value."""
    with pytest.raises(ValueError, match=r"control characters|begins with a dash"):
        forms.plain_name(value)
    assert forms.plain_name("модель/x-1 [y]") == "модель/x-1 [y]"


@pytest.mark.parametrize("value", ["not a host!!", " ", "a..b", ".", "x" * 64, "a\n", "-a", "http://x", "[::1]", "é"])
def test_an_address_that_cannot_be_bound_is_told_before_the_start(value: str) -> None:
    """Some of these would be a traceback from the resolver."""
    with pytest.raises(ValueError, match="is no address"):
        forms.host_name(value)


@pytest.mark.parametrize("value", ["127.0.0.1", "::1", "::", "0.0.0.0", "localhost", "a-b.example.", "fe80::1%eth0"])
def test_addresses_are_left_as_they_are(value: str) -> None:
    """Names, and both kinds of IP addresses."""
    assert forms.host_name(value) == value
