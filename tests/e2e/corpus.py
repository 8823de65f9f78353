"""Requests whose greedy answers must not depend on how the model is deployed.

Lengths are exact because the prompts are token ids: one token, around the KV block size, around multiples of it, and
up to the context limit. Text prompts cover unicode, chat and plain completions. Each prompt has a beginning of its
own, so that no prefix cache can stand in for the handoff.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_MODEL_LEN = 1024
BLOCK = 128
ANSWER_TOKENS = 12

_WORDS = [
    "The capital of France is",
    "Once upon a time, a small robot",
    "Water boils at",
    "In the year 1969, people",
    "def fibonacci(n):",
    "SELECT name FROM",
    "The three primary colours are",
    "A recipe for bread starts with",
]
_UNICODE = [
    "Überraschung: größer als",
    "日本の首都は",
    "Привет, как",
    "🙂🚀 emoji and text",
    "naïve café — “quotes” …",
    "हिन्दी में एक वाक्य",
    "\u200bzero width",
    "مرحبا بالعالم",
]
_QUESTIONS = [
    "What is the capital of France?",
    "Name three fruits.",
    "Say hello in German.",
    "How many legs does a spider have?",
    "Was ist größer: 3 oder 5?",
    "写一句话介绍你自己",
    "Write one line of Python that prints hi.",
    "Continue the sequence: 2, 4, 6,",
]
_LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 500, 511, 512]
_LONG = [513, 640, 767, 1000, MAX_MODEL_LEN - ANSWER_TOKENS, MAX_MODEL_LEN - 1]


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a name for the test report, where to post it, and what."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


def _token_ids(length: int) -> list[int]:
    """Ids of ordinary tokens, different from the first one on for each length."""
    return [1000 + (length * 7919 + position * 104_729) % 40_000 for position in range(length)]


def cases(model: str) -> list[Case]:
    """At least 60 requests, half of them streamed."""
    base = {"model": model, "temperature": 0, "max_tokens": ANSWER_TOKENS}
    plain: list[tuple[str, str, dict[str, Any]]] = []
    for length in [*_LENGTHS, *_LONG]:
        plain.append((f"{length}-tokens", "/v1/completions", {**base, "prompt": _token_ids(length)}))
    for number, text in enumerate([*_WORDS, *_UNICODE]):
        plain.append((f"text-{number}", "/v1/completions", {**base, "prompt": text}))
    for number, text in enumerate(_QUESTIONS):
        plain.append((f"chat-{number}", "/v1/chat/completions", {**base, "messages": _user(text)}))
    special: list[tuple[str, str, dict[str, Any]]] = [
        ("one-answer-token", "/v1/completions", {**base, "prompt": "The sky is", "max_tokens": 1}),
        ("one-chat-token", "/v1/chat/completions", {**base, "messages": _user("Hi there"), "max_tokens": 1}),
        ("stop-string", "/v1/completions", {**base, "prompt": "1, 2, 3, 4, 5, 6,", "stop": [" 9"]}),
        ("min-tokens", "/v1/completions", {**base, "prompt": "Done.", "min_tokens": 8}),
        ("ignore-eos", "/v1/chat/completions", {**base, "messages": _user("Say ok."), "ignore_eos": True}),
        ("max-completion-tokens", "/v1/chat/completions", _newer(base, "Count to five.")),
        ("system-prompt", "/v1/chat/completions", {**base, "messages": [_system(), *_user("Who are you?")]}),
        ("two-turns", "/v1/chat/completions", {**base, "messages": _turns()}),
        ("logprobs", "/v1/completions", {**base, "prompt": "Roses are red,", "logprobs": 2}),
        ("chat-logprobs", "/v1/chat/completions", {**base, "messages": _user("Rhyme with cat."), "logprobs": True}),
    ]
    found: list[Case] = []
    for number, (name, path, body) in enumerate([*plain, *special]):
        if number % 2:
            found.append(Case(f"{name}-streamed", path, {**body, "stream": True, **_usage(number)}))
        else:
            found.append(Case(name, path, body))
    return found


def _usage(number: int) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if number % 4 == 1 else {}


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _system() -> dict[str, str]:
    return {"role": "system", "content": "You are a pirate. Answer briefly."}


def _turns() -> list[dict[str, str]]:
    return [*_user("My name is Ada."), {"role": "assistant", "content": "Hello Ada!"}, *_user("What is my name?")]


def _newer(base: dict[str, Any], text: str) -> dict[str, Any]:
    body = {k: v for k, v in base.items() if k != "max_tokens"}
    return {**body, "messages": _user(text), "max_completion_tokens": ANSWER_TOKENS}
