"""The toy model: loss-free text, and next tokens that depend on exactly the KV that was read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.emulated.model import EOS, MASK, VOCAB_SIZE, WORDS, Tokenizer, ToyModel

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60)


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    """Echo and unicode prompts come back as they were sent."""
    tokenizer = Tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_every_id_is_in_the_vocabulary(text: str) -> None:
    """Lone surrogates, which JSON can carry, are replaced and do not fail."""
    assert all(0 <= token < VOCAB_SIZE for token in Tokenizer().encode(text))


def test_words_of_the_model_encode_to_themselves() -> None:
    """An answer that comes back in the next turn's prompt has the same ids, so its KV can be found again."""
    tokenizer = Tokenizer()
    said = list(WORDS[::7])
    assert tokenizer.encode(tokenizer.decode(said)) == said
    assert len(set(WORDS)) == len(WORDS)


@given(TOKENS, st.integers(1, 59))
def test_kv_does_not_depend_on_how_a_prompt_is_cut(tokens: list[int], cut: int) -> None:
    """Chunked prefill, and decode's recomputation of the last token, give the same KV as one piece."""
    model = ToyModel.named("m")
    whole = model.extend(0, tokens)
    head = model.extend(0, tokens[:cut])
    tail = model.extend(head[-1] if head else 0, tokens[cut:])
    assert whole == head + tail


@given(TOKENS, st.integers(1, MASK))
def test_changed_kv_changes_the_context_of_every_later_token(tokens: list[int], damage: int) -> None:
    """Garbage read from a stale block is carried into all KV that is computed on top of it."""
    model = ToyModel.named("m")
    clean = model.extend(1, tokens)
    dirty = model.extend((1 + damage) & MASK, tokens)
    assert all(a != b for a, b in zip(clean, dirty, strict=True))


def test_two_models_do_not_share_kv() -> None:
    """The model's name is its weights."""
    assert ToyModel.named("a").extend(0, [5]) != ToyModel.named("b").extend(0, [5])


def test_answers_end_by_themselves_unless_told_not_to() -> None:
    """About one token in `mean_output_tokens` ends the answer, none if 0, and none if the request forbids it."""
    ending, endless = ToyModel.named("m", 64), ToyModel.named("m", 0)
    contexts = ending.extend(0, list(range(20_000)))
    ends = sum(ending.next_token(context) == EOS for context in contexts)
    assert 200 < ends < 450
    assert all(endless.next_token(context) != EOS for context in contexts)
    assert all(ending.next_token(context, may_end=False) != EOS for context in contexts)


def test_token_0_has_content_too() -> None:
    """A prompt of zeros is no empty prompt: a block that was never written must not pass for it."""
    sums = ToyModel.named("m").extend(0, [0, 0])
    assert len({0, *sums}) == 3
