"""Older spellings of speculative settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from disagg.engines.speculation import OLD_KEYS, translate

KEYS = st.sampled_from([*OLD_KEYS, *OLD_KEYS.values(), "method", "num_speculative_tokens", "anything"])


def test_the_old_draft_name_becomes_model_and_method() -> None:
    """Newer vLLM drops the old key silently and then complains about the tokens."""
    given_config: dict[str, JsonValue] = {"speculative_model": "draft", "num_speculative_tokens": 3}
    result = translate(given_config)
    assert result.config == {"num_speculative_tokens": 3, "model": "draft", "method": "draft_model"}
    assert result.renamed == (("speculative_model", "model"),)
    assert given_config == {"speculative_model": "draft", "num_speculative_tokens": 3}


def test_the_old_word_for_n_gram_is_a_method_and_no_model() -> None:
    """A draft of the name [ngram] never was a model."""
    assert translate({"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 4}).config == {
        "method": "ngram",
        "prompt_lookup_max": 4,
    }


def test_two_spellings_that_differ_are_a_conflict() -> None:
    """Which one was meant cannot be known."""
    assert translate({"speculative_model": "a", "model": "b"}).conflicts == ("speculative_model and model",)
    assert translate({"speculative_model": "a", "model": "a"}).conflicts == ()


@given(st.dictionaries(KEYS, st.text(max_size=5) | st.integers()))
def test_translation_is_complete_and_stable(config: dict[str, JsonValue]) -> None:
    """No old key is left, and a second pass changes nothing."""
    once = translate(config)
    assert not once.config.keys() & OLD_KEYS.keys()
    assert translate(once.config).config == once.config
    assert translate(once.config).renamed == ()
