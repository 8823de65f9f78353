"""What holds for a stage."""

from __future__ import annotations

import pytest

from disagg.engines.settings import flag_name, flag_path, stage_settings
from disagg.topology.secrets import is_secret
from disagg.topology.spec import Stage
from tests.support.engine_cases import pair


def test_a_pools_own_value_wins_over_the_topologys() -> None:
    """Each stage may differ from what all stages share."""
    topology = pair(max_model_len=4096, decode={"max_model_len": 2048, "max_num_seqs": 8}, max_num_seqs=1)
    assert stage_settings(topology, Stage.PREFILL).max_model_len == 4096
    assert stage_settings(topology, Stage.DECODE).max_model_len == 2048
    assert stage_settings(topology, Stage.PREFILL).max_num_seqs == 1
    assert stage_settings(topology, Stage.DECODE).max_num_seqs == 8


def test_engine_flags_and_environment_are_merged_by_name_whatever_the_spelling() -> None:
    """One flag in two spellings is one flag, and the pool's wins."""
    topology = pair(
        engine_args={"max_logprobs": 5, "dtype": "auto"},
        env={"A": "all", "B": "all"},
        decode={"engine_args": {"max-logprobs": 20}, "env": {"B": "decode"}},
    )
    decode = stage_settings(topology, Stage.DECODE)
    assert decode.engine_args == {"max-logprobs": 20, "dtype": "auto"}
    assert decode.env == {"A": "all", "B": "decode"}
    assert stage_settings(topology, Stage.PREFILL).engine_args == {"max-logprobs": 5, "dtype": "auto"}


def test_the_part_of_a_dotted_flag_keeps_its_underscores() -> None:
    """The part is a key of the engine's JSON, not a flag."""
    assert flag_name("--compilation_config.cudagraph_mode") == "compilation-config.cudagraph_mode"


def test_a_problem_names_the_place_that_set_the_flag() -> None:
    """The pool's path if the pool has it, else the topology's."""
    topology = pair(engine_args={"dtype": "auto"}, decode={"engine_args": {"seed-x": 1}})
    assert flag_path(topology, Stage.DECODE, "seed-x") == "decode.engine_args.seed-x"
    assert flag_path(topology, Stage.DECODE, "dtype") == "engine_args.dtype"


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD"])
def test_names_of_secrets_are_known(name: str) -> None:
    """What must not be printed or stored is told by its name."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "HF_HOME", "MAX_TOKENS", "KEYBOARD"])
def test_ordinary_names_are_not_taken_for_secrets(name: str) -> None:
    """A false alarm would refuse a working configuration."""
    assert not is_secret(name)
