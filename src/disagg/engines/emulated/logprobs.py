"""Log probabilities in the shapes of both APIs, made from the KV as the text is: the toy has no distribution."""

from __future__ import annotations

from typing import Any

from disagg.engines.emulated.model import WORDS, Tokenizer, logprob_of, mix
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.sequence import Sequence


def ranked(context: int, token: int, top: int) -> list[tuple[int, float]]:
    """The sampled token and the most likely others, at least one entry, most likely first."""
    out = [(token, logprob_of(context, 1))]
    salt = 1
    while len(out) < top:
        other = WORDS[mix(context + salt) % len(WORDS)]
        if all(other != known for known, _ in out):
            out.append((other, logprob_of(context, len(out) + 1)))
        salt += 1
    return out


def _ranked_prompt(context: int, token: int, top: int) -> list[tuple[int, float, int]]:
    """A prompt token with a rank of its own, then the most likely ones, as token, log probability and rank."""
    rank = 2 + top + mix(context ^ token) % 500
    out = [(token, logprob_of(context, 1) - rank / 64, rank)]
    for place, (other, value) in enumerate(ranked(context, WORDS[mix(context) % len(WORDS)], top), 1):
        if place <= top and other != token:
            out.append((other, value, place))
    return out


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.token_text(token, special=True)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def chat_logprobs(seq: Sequence, begin: int, end: int, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of the output tokens from `begin` to `end`, each with `top` alternatives."""
    content = []
    for token, context in zip(seq.output[begin:end], seq.contexts[begin:end], strict=True):
        rows = ranked(context, token, top)
        entry = _entry(token, rows[0][1], tokenizer)
        entry["top_logprobs"] = [_entry(other, value, tokenizer) for other, value in rows[:top]]
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    seq: Sequence,
    generation: Generation,
    tokenizer: Tokenizer,
    span: tuple[int, int] | None = None,
    *,
    with_prompt: bool = True,
) -> dict[str, Any]:
    """Of the output tokens of a span, after those of the prompt if that is echoed."""
    top = generation.logprobs or 0
    begin, end = span or (0, len(seq.output))
    rows: list[tuple[int, int | None]] = []
    if generation.echoed and with_prompt:
        rows += zip(seq.prompt, _before_each(seq), strict=True)
    if not generation.only_echo:
        rows += zip(seq.output[begin:end], seq.contexts[begin:end], strict=True)
    offset = 0
    if begin or (generation.echoed and not with_prompt):
        shown = seq.prompt + seq.output[:begin] if generation.echoed else seq.output[:begin]
        offset = sum(len(tokenizer.token_text(token, special=True)) for token in shown)
    out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    prompt_rows = len(rows) - (0 if generation.only_echo else end - begin)
    for index, (token, context) in enumerate(rows):
        text = tokenizer.token_text(token, special=True)
        out["text_offset"].append(offset)
        out["tokens"].append(text)
        offset += len(text)
        pairs: list[tuple[int, float]] | None = None
        if context is not None and index < prompt_rows:
            pairs = [(other, value) for other, value, _ in _ranked_prompt(context, token, top)]
        elif context is not None:
            pairs = ranked(context, token, top)[: max(1, top)]
        out["token_logprobs"].append(None if pairs is None else pairs[0][1])
        named = None if pairs is None else {tokenizer.token_text(t, special=True): value for t, value in pairs}
        out["top_logprobs"].append(named)
    return out


def prompt_logprobs(seq: Sequence, top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """One entry per prompt token; the first has nothing before it."""
    out: list[dict[str, Any] | None] = []
    for token, context in zip(seq.prompt, _before_each(seq), strict=True):
        if context is None:
            out.append(None)
            continue
        row = {}
        for other, value, rank in _ranked_prompt(context, token, top):
            row[str(other)] = {
                "logprob": value,
                "rank": rank,
                "decoded_token": tokenizer.token_text(other, special=True),
            }
        out.append(row)
    return out


def _before_each(seq: Sequence) -> list[int | None]:
    """The KV sum in front of each prompt token."""
    return [None, *seq.prompt_contexts[: len(seq.prompt) - 1]]
