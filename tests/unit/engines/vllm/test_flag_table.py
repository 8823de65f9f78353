"""The list of vLLM's flags as the package ships it."""

from __future__ import annotations

import pytest

from disagg.engines.vllm.adapter import VllmAdapter
from disagg.engines.vllm.command import TYPED_FLAGS

TABLE = VllmAdapter().flag_table()


def test_the_table_names_the_version_that_it_was_read_from() -> None:
    """A message about an unknown flag says unknown to whom."""
    assert TABLE.engine == "vLLM 0.32.0"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("enforce-eager", "bool"),
        ("block-size", "int"),
        ("gpu-memory-utilization", "float"),
        ("device-memory-utilization", "float"),
        ("max-model-len", "str"),
        ("compilation-config", "json"),
        ("lora-modules", "list"),
    ],
)
def test_flags_have_their_kinds(name: str, kind: str) -> None:
    """Numbers that may be written 16k are text with a pattern; aliases are known as well."""
    assert TABLE.flags[name].kind == kind


def test_every_flag_that_the_adapter_sets_exists() -> None:
    """A renamed flag in a newer vLLM turns this red instead of a start at a user's."""
    ours = {
        *TYPED_FLAGS,
        "model",
        "served-model-name",
        "host",
        "port",
        "kv-transfer-config",
        "speculative-config",
        "generation-config",
        "seed",
        "enforce-eager",
        "kv-cache-memory-bytes",
        "distributed-executor-backend",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "enable-expert-parallel",
        "disable-uvicorn-access-log",
        "disable-access-log-for-endpoints",
        "enable-log-requests",
    }
    assert ours <= TABLE.flags.keys()


def test_every_reserved_flag_exists_and_says_what_to_use() -> None:
    """A reserved name that vLLM does not have protects nothing."""
    assert TABLE.reserved.keys() <= TABLE.flags.keys()
    assert all(TABLE.reserved.values())


def test_choices_come_with_the_flags() -> None:
    """A wrong word is found without starting the engine."""
    assert "bfloat16" in TABLE.flags["dtype"].choices
