"""Compile settings in one spelling."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from disagg.engines.qaic.override import ALIASES, IGNORED, normalise

KEYS = st.sampled_from(
    [
        *ALIASES,
        *IGNORED,
        "num-cores",
        " NUM_CORES ",
        "num_devices",
        "mos",
        "stages",
        "prefill_only",
        "comp_ctx_lengths_decode",
        "comp-ctx-lengths-prefill",
        "embed_seq_len",
        "qpc_path",
        "node_precision_info",
        "compiler_args",
        "split_retained_state_io",
        "qaic_config",
    ]
) | st.text(max_size=6)
VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["True", "FALSE", "1", "0", "", "[0,1]", "0 1", "0,1", "a=1|-b c=D", "/Path/To X", " mxfp6 "])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
LIMITS = st.none() | st.integers(1, 70000)
IDS = st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True)


@given(st.dictionaries(KEYS, VALUES, max_size=6), LIMITS)
def test_any_settings_are_read_and_a_second_pass_changes_nothing(
    given_config: dict[str, JsonValue], limit: int
) -> None:
    """Stable, without nulls, keys in one form, always JSON; and what the user wrote is not touched."""
    before = json.dumps(given_config)
    once = normalise(given_config, limit)
    assert json.dumps(given_config) == before
    for key, value in once.config.items():
        assert key == key.strip().lower().replace("-", "_")
        assert key not in ALIASES
        assert key not in IGNORED
        assert value is not None
    json.dumps(once.config)
    again = normalise(once.config, limit)
    assert again.config == once.config
    assert again.notes == []


@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True), st.sampled_from(["device_id", "Device-IDs"])
)
def test_devices_are_read_in_every_form(ids: list[int], key: str) -> None:
    """An int, a list and three texts name the same devices, in the order written."""
    text = ",".join(map(str, ids))
    forms: list[JsonValue] = [[*ids], text, f"[{text}]", text.replace(",", " ")]
    if len(ids) == 1:
        forms.append(ids[0])
    for form in forms:
        result = normalise({key: form}, None)
        assert result.errors == []
        assert result.config == {"device_group": ids, "num_devices": len(ids)}


@pytest.mark.parametrize("key", ["mxfp6", "mxfp6-en", "MXFP6_MATMUL"])
@pytest.mark.parametrize("value", [True, "True", "true", "1", "", 1])
def test_a_switch_is_on_in_every_spelling(key: str, value: JsonValue) -> None:
    """The seed writes mxfp6_matmul:True; a bare key, 1 and true mean the same."""
    assert normalise({key: value}, None).config == {"mxfp6_matmul": True}


@pytest.mark.parametrize("value", [False, "False", "0", 0])
def test_a_switch_is_off_in_every_spelling(value: JsonValue) -> None:
    """Off is a setting, not an absence: the default may be on."""
    assert normalise({"aic_enable_depth_first": value}, None).config == {"dfs": False}


def test_counts_stay_numbers() -> None:
    """num_cores of 1 is one core, not true."""
    assert normalise({"num_cores": "10", "stages": 1, "mos": "-1"}, None).config == {
        "num_cores": 10,
        "stages": 1,
        "mos": -1,
    }


def test_paths_keep_their_letters_and_other_words_do_not() -> None:
    """A lower-cased path does not exist."""
    config = normalise(
        {"qpc_path": " /Data/QPC ", "pooling_method": "CLS", "node_precision_info": "/N.yaml"}, None
    ).config
    assert config == {"qpc_path": "/Data/QPC", "pooling_method": "cls", "node_precision_info": "/N.yaml"}
    assert normalise({"node_precision_info": "True"}, None).config == {"node_precision_info": True}


def test_compiler_arguments_are_taken_apart() -> None:
    """They are settings like the others, written as one text."""
    assert normalise({"compiler_args": "-aic-num-cores=8|verbose mos=2"}, None).config == {
        "num_cores": 8,
        "verbose": True,
        "mos": 2,
    }


def test_what_follows_from_serving_flags_is_left_out_and_told() -> None:
    """A context length here that differs from the served one would be compiled for nothing."""
    result = normalise({"ctx_len": 4096, "full-batch-size": 4}, None)
    assert result.config == {}
    assert len(result.notes) == 2


def test_context_lengths_are_sorted_and_dropped_beyond_the_limit() -> None:
    """A length that no request can have makes the whole list void, as on the device."""
    assert normalise({"comp_ctx_lengths_decode": "4096,1024"}, 4096).config == {
        "comp_ctx_lengths_decode": [1024, 4096]
    }
    beyond = normalise({"comp_ctx_lengths_decode": [1024, 8192]}, 4096)
    assert beyond.config == {}
    assert "4096" in beyond.notes[0]


def test_an_embedding_length_has_to_include_the_limit() -> None:
    """Otherwise the longest prompt has no binary."""
    assert normalise({"embed_seq_len": [128, 512]}, 512).errors == []
    assert normalise({"embed_seq_len": "128,256"}, 512).errors != []


@pytest.mark.parametrize(
    "config",
    [
        {"num_cores": "many"},
        {"num_cores": True},
        {"device_group": "none"},
        {"device_group": [0, 0]},
        {"device_group": [0, 1], "num_devices": 3},
        {"num_cores": 8, "aic_num_cores": 6},
        {"dfs": "perhaps"},
        {"comp_ctx_lengths_decode": "long"},
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_key(config: dict[str, JsonValue]) -> None:
    """Contradictions and nonsense are told, not guessed."""
    errors = normalise(config, None).errors
    assert len(errors) == 1
    assert errors[0].split(" ")[0].split(":")[0] in {ALIASES.get(key, key) for key in config}


def test_the_same_value_under_two_names_is_no_contradiction() -> None:
    """A file and a flag may both say it."""
    assert normalise({"num_cores": 8, "aic_num_cores": "8"}, None).errors == []
