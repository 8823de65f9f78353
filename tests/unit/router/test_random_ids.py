"""Ids that nobody can guess."""

import re

from disagg.router.random_ids import RandomIds


def test_an_id_is_32_hex_digits_and_is_handed_out_once() -> None:
    """Also when more are taken than are drawn at a time."""
    ids = RandomIds()
    taken = [ids.take() for _ in range(1_000)]
    assert len(set(taken)) == 1_000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in taken)


def test_two_sources_share_nothing() -> None:
    """Public ids and the keys of transfers come from different ones: who sees the first cannot tell the second."""
    one, other = RandomIds(), RandomIds()
    assert {one.take() for _ in range(200)}.isdisjoint({other.take() for _ in range(200)})
