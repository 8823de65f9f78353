"""Conditional disaggregation: whether a prompt is worth a handoff."""

from __future__ import annotations

from collections.abc import Iterable

SHORT_PROMPT = "short-prompt"
"""The reason that is shown with such a request."""


def local_reason(prompt_tokens: float, cached_tokens: Iterable[float], threshold: int) -> str | None:
    """Why a request is prefilled where it is decoded, or None if it is handed over.

    Prefilling a few tokens beside running decodes costs these little, and saves the request a hop and a transfer.

    Args:
        prompt_tokens: Length of the prompt, counted or estimated; 0 if it is not known, which is never short.
        cached_tokens: What each decode instance is thought to hold of it, in tokens.
        threshold: Fewer uncached tokens than this are prefilled locally; 0 hands every prompt over.
    """
    if threshold <= 0 or prompt_tokens <= 0:
        return None
    uncached = prompt_tokens - max(cached_tokens, default=0.0)
    return SHORT_PROMPT if uncached < threshold else None
