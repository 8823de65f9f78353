"""Where a sequence ends: stop strings, stop tokens, end of sequence, limits, and min_tokens before all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.emulated.model import EOS, WORDS, Tokenizer, ToyModel
from disagg.engines.emulated.sequence import Sampling, Sequence

TOKENIZER = Tokenizer()
LIMIT = 1000


def fed(tokens: list[int], sampling: Sampling, limit: int = LIMIT) -> Sequence:
    """A sequence that was given these tokens until it ended."""
    seq = Sequence("r", [1], sampling, on_output=lambda _: None)
    for token in tokens:
        if seq.append(token, 0, TOKENIZER, limit):
            break
    return seq


WORD = list(WORDS[:8])
TEXT = TOKENIZER.decode(WORD)


@given(st.lists(st.text("abn ", min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 6))
def test_a_stop_string_cuts_at_its_first_place_after_min_tokens(stop: list[str], min_tokens: int) -> None:
    """The text ends before the earliest stop string that a token after min_tokens completes."""
    tokens = TOKENIZER.encode("ab an nab ban naab nana bab")
    seq = fed(tokens, Sampling(max_tokens=50, stop=tuple(stop), min_tokens=min_tokens))
    whole = TOKENIZER.decode(tokens)
    if seq.finish_reason is None:
        after = len(TOKENIZER.decode(tokens[:min_tokens]))
        assert seq.text == whole
        assert all(whole.find(word, after) < 0 for word in stop)
    else:
        assert seq.finish_reason == "stop"
        assert seq.stop_reason in stop
        assert whole.startswith(seq.text + str(seq.stop_reason))
        assert len(seq.output) > min_tokens


def test_a_stop_string_may_lie_across_tokens_and_be_kept() -> None:
    """include_stop_str_in_output keeps it, and no more."""
    across = TEXT[2:6]
    assert fed(WORD, Sampling(max_tokens=50, stop=(across,))).text == TEXT[:2]
    assert fed(WORD, Sampling(max_tokens=50, stop=(across,), include_stop=True)).text == TEXT[:6]


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    """A stream never shows a character that the final text does not have."""
    seq = Sequence("r", [1], Sampling(max_tokens=50, stop=("xyzw",)), on_output=lambda _: None)
    seq.append(WORD[0], 0, TOKENIZER, LIMIT)
    assert seq.visible == len(seq.text) - 3
    seq.finish_reason = "length"
    assert seq.visible == len(seq.text)


def test_tokens_that_end_it() -> None:
    """EOS has no stop reason and no text; a stop token is its own reason; both wait for min_tokens."""
    eos = [WORD[0], EOS, WORD[1]]
    ended = fed(eos, Sampling(max_tokens=50))
    assert (ended.finish_reason, ended.stop_reason, len(ended.output)) == ("stop", None, 2)
    assert ended.text == TOKENIZER.decode(WORD[:1])
    assert fed(eos, Sampling(max_tokens=3, ignore_eos=True)).finish_reason == "length"
    stopped = fed(WORD, Sampling(max_tokens=50, stop_token_ids=frozenset({WORD[2]})))
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.output)) == ("stop", WORD[2], 3)
    assert stopped.text == TOKENIZER.decode(WORD[:2])


def test_limits_end_it_by_length() -> None:
    """max_tokens and the context limit, whichever comes first."""
    assert len(fed(WORD, Sampling(max_tokens=3)).output) == 3
    by_context = fed(WORD, Sampling(max_tokens=50), limit=5)
    assert (by_context.finish_reason, by_context.length) == ("length", 5)


@given(st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_what_is_forced_banned_or_too_early_is_obeyed(context: int, min_tokens: int) -> None:
    """logit_bias at its ends, allowed tokens, and no end before min_tokens."""
    model = ToyModel.named("m", mean_output_tokens=2)
    base = Sampling(max_tokens=9, min_tokens=min_tokens)
    plain = Sequence("r", [1], base, on_output=lambda _: None)
    token = plain.choose(model, context)
    if min_tokens:
        assert token != EOS
    banned = Sequence("r", [1], replace(base, banned=frozenset({token})), on_output=lambda _: None)
    assert banned.choose(model, context) != token
    early = Sequence("r", [1], replace(base, stop_token_ids=frozenset({token})), on_output=lambda _: None)
    if min_tokens:
        assert early.choose(model, context) != token
    forced = Sequence("r", [1], replace(base, forced=(7, 9)), on_output=lambda _: None)
    assert forced.choose(model, context) in {7, 9}
