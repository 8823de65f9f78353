"""The sampling fields of a request: read with the schema, checked after the prompt, as vLLM does."""

from __future__ import annotations

import math

from disagg.engines.emulated.fields import Fields, rejected
from disagg.engines.emulated.model import VOCAB_SIZE, mix
from disagg.engines.emulated.script import Script
from disagg.engines.emulated.sequence import Sampling

_GREEDY = 1e-5
_MAX_CHOICES = 16_384
_MAX_STOPS = 4
_INT64_MAX = 2**63 - 1


class SamplingDraft:
    """Sampling fields as sent.

    Attributes:
        asked: Output tokens asked for; None leaves it to the context limit.
    """

    def __init__(self, fields: Fields, *, chat: bool) -> None:
        completion_limit = fields.body.get("max_completion_tokens") is not None and chat
        self._max_name = "max_completion_tokens" if completion_limit else "max_tokens"
        asked = fields.integer(self._max_name)
        self.asked = asked if asked is not None or chat else 16
        self._min_tokens = fields.integer("min_tokens") or 0
        n = fields.integer("n")
        self._n = 1 if n is None else n
        self._seed = fields.integer("seed")
        fields.within("seed", self._seed, _INT64_MAX)
        self._temperature = _number(fields, "temperature", 1.0)
        self._top_p = _number(fields, "top_p", 1.0)
        self._min_p = _number(fields, "min_p", 0.0)
        self._top_k = fields.integer("top_k") or 0
        self._repetition = _number(fields, "repetition_penalty", 1.0)
        self._penalties = {name: _number(fields, name, 0.0) for name in ("presence_penalty", "frequency_penalty")}
        self._stop = fields.strings("stop", _MAX_STOPS)
        self._stop_token_ids = frozenset(fields.integers("stop_token_ids"))
        self._include_stop = fields.flag("include_stop_str_in_output")
        self._ignore_eos = fields.flag("ignore_eos")
        self._allowed = None if fields.body.get("allowed_token_ids") is None else fields.integers("allowed_token_ids")
        self._bias = fields.mapping("logit_bias") or {}

    def check_length(self, max_model_len: int) -> None:
        """Refuse a limit that no prompt would leave room for.

        Raises:
            BadRequestError: If more tokens are asked for than the context has.
        """
        if self.asked is not None and self.asked > max_model_len:
            raise rejected(
                f"{self._max_name}={self.asked} cannot be greater than max_model_len={max_model_len}. "
                "Please request fewer output tokens.",
                self._max_name,
                self.asked,
            )

    def limit(self, room: int) -> int:
        """Output tokens at most, where the context has room for so many."""
        return room if self.asked is None else min(self.asked, room)

    def samplings(
        self, max_tokens: int, *, record: bool, prompt_logprobs: bool, script: Script | None = None
    ) -> list[Sampling]:
        """One sampling per choice.

        Raises:
            BadRequestError: If a value is out of its range.
        """
        self._check_distribution()
        self._check_ends(max_tokens)
        forced, banned = self._biased()
        out = []
        for choice in range(self._n):
            plain = self._temperature < _GREEDY or (self._seed is None and choice == 0)
            salt = 0 if plain else mix((self._seed or 0) * 1009 + choice + 1)
            out.append(
                Sampling(
                    max_tokens=max_tokens,
                    min_tokens=self._min_tokens,
                    salt=salt,
                    stop=self._stop,
                    stop_token_ids=self._stop_token_ids,
                    include_stop=self._include_stop,
                    ignore_eos=self._ignore_eos,
                    forced=forced,
                    banned=banned,
                    record=record,
                    prompt_logprobs=prompt_logprobs,
                    script=script,
                )
            )
        return out

    def _check_distribution(self) -> None:
        if self._n < 1:
            raise rejected(f"n must be at least 1, got {self._n}.")
        if self._n > _MAX_CHOICES:
            raise rejected(f"n must be at most {_MAX_CHOICES}, got {self._n}.")
        for name, value in self._penalties.items():
            if not -2.0 <= value <= 2.0:
                raise rejected(f"{name} must be in [-2, 2], got {value}.")
        if self._repetition <= 0.0:
            raise rejected(f"repetition_penalty must be greater than zero, got {self._repetition}.")
        temperature = self._temperature
        if not math.isfinite(temperature):
            raise rejected(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
        if temperature < 0.0:
            raise rejected(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
        if temperature > 2.0:
            raise rejected(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
        if not 0.0 < self._top_p <= 1.0:
            raise rejected(f"top_p must be in (0, 1], got {self._top_p}.", "top_p", self._top_p)
        if self._top_k < -1:
            raise rejected(f"top_k must be 0 (disable), or at least 1, got {self._top_k}.")
        if not 0.0 <= self._min_p <= 1.0:
            raise rejected(f"min_p must be in [0, 1], got {self._min_p}.")

    def _check_ends(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise rejected(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
        least = self._min_tokens
        if least < 0:
            raise rejected(f"min_tokens must be greater than or equal to 0, got {least}.")
        if least > max_tokens:
            raise rejected(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}.")
        if any(not stop for stop in self._stop):
            raise rejected("stop cannot contain an empty string.")
        if self._temperature < _GREEDY and self._n > 1:
            raise rejected(f"n must be 1 when using greedy sampling, got {self._n}.")

    def _biased(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """Tokens that are forced and that are banned. A bias decides only at its ends, +100 and -100."""
        wrong = [key for key in self._bias if not key.strip().lstrip("-").isdecimal()]
        if wrong:
            message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}"
            raise rejected(message, "logit_bias", wrong)
        bias = {int(token): value for token, value in self._bias.items()}
        outside = [token for token in bias if not 0 <= token < VOCAB_SIZE]
        if outside:
            raise rejected(
                f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids. Vocabulary size: {VOCAB_SIZE}",
                "logit_bias",
                outside,
            )
        if self._allowed is not None and not self._allowed:
            raise rejected("allowed_token_ids is not None and empty!", "allowed_token_ids", [])
        allowed = self._allowed or []
        if any(not 0 <= token < VOCAB_SIZE for token in allowed):
            raise rejected("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", allowed)
        strong = {token: value for token, value in bias.items() if isinstance(value, int | float)}
        forced = tuple(token for token, value in strong.items() if value >= 100) or tuple(allowed)
        return forced, frozenset(token for token, value in strong.items() if value <= -100)


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name)
    return default if value is None else value
