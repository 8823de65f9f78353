"""Device groups and ports as users type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.units import format_id_group, parse_id_group, parse_ports, printable


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0..15", tuple(range(16))),
        ("16..23", tuple(range(16, 24))),
        ("0,2,4", (0, 2, 4)),
        ("0..3,8", (0, 1, 2, 3, 8)),
        ("7", (7,)),
        (" 1 , 2..3 ", (1, 2, 3)),
    ],
)
def test_groups_are_ranges_ids_and_mixtures(text: str, ids: tuple[int, ...]) -> None:
    """Ranges are inclusive, as in the launch commands that users bring along."""
    assert parse_id_group(text) == ids


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an id or a range"),
        ("3..1", "write 1..3"),
        ("0..", "not an id or a range"),
        ("0-3", "not an id or a range"),
        ("a", "not an id or a range"),
        ("-1", "not an id or a range"),
        ("1,,2", "not an id or a range"),
        ("0..3,2", "id 2 is repeated"),
        ("0..999999", "more than 4096"),
        ("0..4095,5000..9000,9001..9999999", "not an id or a range"),
    ],
)
def test_a_wrong_group_is_refused_with_what_would_be_right(text: str, says: str) -> None:
    """A typing error never becomes another group of devices, and a huge range never fills the memory."""
    with pytest.raises(ValueError, match=says):
        parse_id_group(text)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=60, unique=True))
def test_a_formatted_group_reads_back(ids: list[int]) -> None:
    """What messages and --print-config show is what the parser takes."""
    assert parse_id_group(format_id_group(ids)) == tuple(ids)


@given(st.text(max_size=20))
def test_any_text_is_either_ids_or_a_value_error(text: str) -> None:
    """No input escapes as another kind of error."""
    try:
        ids = parse_id_group(text)
    except ValueError:
        return
    assert ids
    assert len(set(ids)) == len(ids)


def test_ports_are_a_comma_list() -> None:
    """One port per instance behind one flag."""
    assert parse_ports("9900,9901") == (9900, 9901)


@pytest.mark.parametrize("text", ["0", "65536", "x", "", "80,", "-1", "1e3", "²"])
def test_a_wrong_port_is_refused(text: str) -> None:
    """Ports outside 1..65535 never reach a bind call."""
    with pytest.raises(ValueError, match="whole numbers from 1 to 65535"):
        parse_ports(text)


def test_text_is_shown_without_control_characters() -> None:
    """Lines and tabs stay; what moves the cursor or ends a line unseen becomes an escape."""
    assert printable("a\tb\nü 模") == "a\tb\nü 模"
    assert printable("\x1b[2J\r\x00\x9b\u2028") == "\\x1b[2J\\r\\x00\\x9b\\u2028"
