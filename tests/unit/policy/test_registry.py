"""Policies by name."""

from __future__ import annotations

from typing import get_args

import pytest

from disagg.errors import ConfigError
from disagg.policy.registry import POLICIES, make_policy
from disagg.topology.router_spec import Router


def test_an_unknown_policy_names_the_known_ones_and_the_place() -> None:
    """The message is enough to correct the file."""
    with pytest.raises(ConfigError) as caught:
        make_policy("fastest", "router.prefill_policy")
    assert "router.prefill_policy" in str(caught.value)
    assert "least-loaded, power-of-two" in str(caught.value)


@pytest.mark.parametrize("field", ["prefill_policy", "decode_policy"])
def test_every_name_that_a_topology_takes_is_registered(field: str) -> None:
    """The file format and the registry cannot drift apart."""
    assert set(get_args(Router.model_fields[field].annotation)) == set(POLICIES)
