"""How many choices a body asks for, in every spelling that an engine's validation takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import Api, Body
from disagg.engines.bodies import about_the_answer, choices_per_prompt, priming, several


def body(**fields: Any) -> Body:
    return msgspec.json.decode(json.dumps(fields).encode(), type=Body)


@pytest.mark.parametrize(
    ("value", "count"),
    [(3, 3), ("4", 4), (2.0, 2), (1, 1), (0, 1), (-5, 1), (None, 1), ("many", 1), ([2], 1), ("inf", 1), ("nan", 1)],
)
def test_choices_are_counted_as_the_engine_reads_them(value: object, count: int) -> None:
    """Choices of a list of prompts are numbered through by it; what the engine refuses has one."""
    assert choices_per_prompt(Api.COMPLETIONS, body(n=value)) == count
    assert choices_per_prompt(Api.GENERATE, body(n=9, sampling_params={"n": value})) == count


@given(st.sampled_from(list(Api)), st.dictionaries(st.sampled_from(["n", "best_of", "use_beam_search"]), st.none()))
def test_nulls_ask_for_nothing(api: Api, fields: dict[str, None]) -> None:
    """Clients send them for what they leave open."""
    assert several(api, body(**fields)) is None


@given(st.sampled_from([Api.CHAT, Api.COMPLETIONS, Api.GENERATE]), st.integers(2, 50))
def test_what_is_primed_is_one_choice_and_primed_once(api: Api, count: int) -> None:
    """The leg that fetches the KV needs no leg of its own; the client's body stays as it was."""
    settings: dict[str, Any] = {"n": count, "use_beam_search": api is not Api.GENERATE}
    asked = body(**({"sampling_params": settings} if api is Api.GENERATE else settings))
    before = {k: bytes(v) for k, v in asked.items()}
    assert several(api, asked) is not None
    assert several(api, priming(api, asked)) is None
    assert {k: bytes(v) for k, v in asked.items()} == before


def test_what_prefill_tells_is_not_asked_of_decode() -> None:
    """A chat's `echo` is no prompt: it is decode's to answer."""
    asked = body(prompt="x", echo=True, prompt_logprobs=1, n=2)
    assert set(about_the_answer(Api.COMPLETIONS, asked)) == {"prompt", "n"}
    assert set(about_the_answer(Api.CHAT, asked)) == {"prompt", "n", "echo"}
