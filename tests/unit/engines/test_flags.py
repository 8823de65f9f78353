"""Pass-through engine flags: known, not ours, of the right kind."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from disagg.engines.base import FlagSpec, FlagTable
from disagg.engines.flags import flag_problem, value_problem

TABLE = FlagTable(
    engine="vLLM 9",
    flags=MappingProxyType(
        {
            "enforce-eager": FlagSpec("bool"),
            "swap-space": FlagSpec("float"),
            "stats-off": FlagSpec("bool", twin=False),
            "block-size": FlagSpec("int"),
            "dtype": FlagSpec("str", choices=("auto", "bfloat16")),
            "max-model-len": FlagSpec("str", pattern=r"-?\d+(\.\d+)?[kKmMgGtT]?|auto"),
            "hf-overrides": FlagSpec("str", structured=True),
            "compilation-config": FlagSpec("json"),
            "sizes": FlagSpec("list", items="int"),
            "model": FlagSpec("str"),
        }
    ),
    reserved=MappingProxyType({"model": "use --model", "kv-transfer-config": "use link"}),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enforce-eager", True),
        ("enforce-eager", False),
        ("stats-off", True),
        ("swap-space", 4),
        ("swap-space", "0.5"),
        ("block-size", 16),
        ("block-size", "16"),
        ("dtype", "bfloat16"),
        ("dtype", None),
        ("max-model-len", 4096),
        ("max-model-len", "16k"),
        ("max-model-len", "auto"),
        ("hf-overrides", {"rope_theta": 1}),
        ("hf-overrides", "module.function"),
        ("compilation-config", {"mode": 3}),
        ("compilation-config", '{"mode": 3}'),
        ("compilation-config.mode", 3),
        ("sizes", [1, 2]),
        ("sizes", 1),
    ],
)
def test_what_the_engine_takes_passes(name: str, value: JsonValue) -> None:
    """No false refusal, in each of the forms that YAML and command lines give values."""
    assert flag_problem(TABLE, name, value, allow_unknown=False) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enforce-eager", "yes", "true or false"),
        ("stats-off", False, "only be switched on"),
        ("block-size", 1.5, "whole number"),
        ("block-size", True, "whole number"),
        ("swap-space", "much", "a number"),
        ("dtype", "bfloat61", "did you mean bfloat16"),
        ("dtype", ["auto"], "one word"),
        ("max-model-len", "many", "many"),
        ("compilation-config", "{", "JSON"),
        ("compilation-config", 3, "JSON"),
        ("sizes", ["a"], "a list"),
        ("sizes", [], "a list"),
        ("enforce-eagre", True, "Did you mean --enforce-eager"),
        ("no-enforce-eager", True, "enforce-eager: false"),
        ("model", "x", "use --model"),
        ("kv-transfer-config", {}, "use link"),
        ("kv-transfer-config.kv_role", "kv_both", "use link"),
    ],
)
def test_what_the_engine_would_refuse_is_told(name: str, value: JsonValue, words: str) -> None:
    """The message says what would be right."""
    problem = flag_problem(TABLE, name, value, allow_unknown=False)
    assert problem is not None
    assert words in problem


def test_unknown_flags_pass_only_when_asked() -> None:
    """A newer engine's flag is usable, but never by accident."""
    refused = flag_problem(TABLE, "brand-new", 1, allow_unknown=False)
    assert refused is not None
    assert "allow_unknown_engine_args" in refused
    assert flag_problem(TABLE, "brand-new", 1, allow_unknown=True) is None


@pytest.mark.parametrize("name", ["kv-transfer", "kv-transfer-conf", "no-kv-transfer-config"])
def test_a_shortened_reserved_flag_stays_reserved(name: str) -> None:
    """The engine's parser completes unique beginnings, so these would reach a reserved flag."""
    assert flag_problem(TABLE, name, {}, allow_unknown=True) is not None


@given(
    st.sampled_from(list(TABLE.flags.values())),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_value_is_judged_and_nothing_raises(spec: FlagSpec, value: JsonValue) -> None:
    """A strange value is a problem in words, not a traceback."""
    problem = value_problem(spec, value)
    assert problem is None or problem
