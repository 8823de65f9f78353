"""One sequence inside an engine: its prompt, how to sample, what it has produced, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from disagg.engines.emulated.blocks import prefix_keys
from disagg.engines.emulated.handoff import RemoteKv
from disagg.engines.emulated.model import EOS, MASK, Tokenizer, ToyModel, mix
from disagg.engines.emulated.script import Script

FinishReason = Literal["stop", "length", "abort", "error"]


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence samples and where it ends.

    Attributes:
        max_tokens: Output tokens at most.
        min_tokens: Output tokens before which nothing but `max_tokens` ends it.
        salt: What sampling depends on besides the KV; 0 is greedy.
        stop: Strings that end the output.
        stop_token_ids: Tokens that end the output.
        include_stop: Keep the stop string or token in the text.
        ignore_eos: Treat the end-of-sequence token as any other.
        forced: Tokens to choose from instead of the model's own, if not empty.
        banned: Tokens that are never chosen.
        record: Keep the KV sum behind each output token, for log probabilities.
        prompt_logprobs: Keep the KV sum at each prompt position; nothing of the prompt is taken from a cache.
        script: What the answer has to say, if its shape is demanded.
    """

    max_tokens: int
    min_tokens: int = 0
    salt: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    forced: tuple[int, ...] = ()
    banned: frozenset[int] = frozenset()
    record: bool = False
    prompt_logprobs: bool = False
    script: Script | None = None

    @property
    def hold_back(self) -> int:
        """Characters at the end of the text that may still turn out to be part of a stop string."""
        if not self.stop or self.include_stop:
            return 0
        return max(map(len, self.stop)) - 1


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence and all that the engine knows about it.

    Attributes:
        request_id: The engine's own id, unique.
        prompt: Prompt tokens.
        sampling: Sampling parameters.
        on_output: Called with the sequence after each token if it streams, and at the end.
        streaming: Whether each token is reported.
        remote: KV that another engine computed for this prompt.
        keep_for_decode: Pin the KV at the end for a decode engine.
        offer_key: Hand the KV at the end to the leg that asks for this.
        forward: Receiver of a decode engine, as host and port, to which the KV is sent before the answer.
        tells_first_token: The handoff parameters in the answer hold the token that was sampled.
        salt_key: Separates prefix caches.
        cached_tokens: Prompt tokens that were found in the prefix cache here, or by the prefill engine.
        external_tokens: Prompt tokens whose KV was loaded from another engine.
        computed: Positions whose KV is in `blocks`.
        params_out: Handoff parameters to return, once finished.
        placed: The cache was searched for it, and counted so.
        adapter: Weights of its own, None for the base model.
        adapter_name: What that is called.
        priority: Lower ones are served first, where priorities count.
        lines: Tokens that it has to say, once they are known.
        arrived: When it came; the three after it are when it first ran, and had its first and latest token.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    on_output: Callable[[Sequence], None]
    streaming: bool = False
    remote: RemoteKv | None = None
    keep_for_decode: bool = False
    offer_key: str | None = None
    forward: tuple[str, int] | None = None
    tells_first_token: bool = False
    salt_key: str = ""
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    output: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    prompt_contexts: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    params_out: dict[str, object] | None = None
    keys: list[int] | None = None
    placed: bool = False
    adapter: ToyModel | None = None
    adapter_name: str | None = None
    priority: int = 0
    lines: list[int] | None = None
    arrived: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return len(self.prompt) + len(self.output)

    def prompt_keys(self, block_size: int) -> list[int]:
        """Prefix keys of the prompt's full blocks, computed once."""
        if self.keys is None:
            self.keys = prefix_keys(self.prompt, block_size, self.salt_key)
        return self.keys

    def tokens(self, start: int, count: int) -> list[int]:
        """Known tokens from a position on."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : start - split + count]
        if start + count <= split:
            return self.prompt[start : start + count]
        return (self.prompt[start:] + self.output)[:count]

    def choose(self, model: ToyModel, context: int) -> int:
        """Sample the next token from the KV."""
        sampling = self.sampling
        if sampling.script is not None:
            if self.lines is None:
                self.lines = sampling.script.tokens(context ^ sampling.salt)
            if len(self.output) < len(self.lines):
                return self.lines[len(self.output)]
        may_end = len(self.output) >= sampling.min_tokens and not sampling.ignore_eos
        if sampling.forced:
            return sampling.forced[mix(context ^ sampling.salt) % len(sampling.forced)]
        token = model.next_token(context, sampling.salt, may_end=may_end)
        if sampling.banned or sampling.stop_token_ids:
            too_early = len(self.output) < sampling.min_tokens
            may_end = may_end and EOS not in sampling.banned
            for attempt in range(1, 64):
                if token not in sampling.banned and not (too_early and token in sampling.stop_token_ids):
                    break
                token = model.next_token(context, (sampling.salt + attempt) & MASK, may_end=may_end)
        return token

    def append(self, token: int, context: int, tokenizer: Tokenizer, limit: int) -> bool:
        """Take a sampled token; True if the sequence ends with it.

        Args:
            token: What was sampled.
            context: The KV sum that it was sampled from.
            tokenizer: Turns it into text.
            limit: Context limit in tokens.
        """
        sampling, output = self.sampling, self.output
        output.append(token)
        if sampling.record:
            self.contexts.append(context)
        enough = len(output) >= sampling.min_tokens
        if token == EOS and not sampling.ignore_eos and enough:
            self.finish_reason = "stop"
            return True
        if token in sampling.stop_token_ids and enough:
            self.finish_reason, self.stop_reason = "stop", token
            if sampling.include_stop:
                self.text += tokenizer.token_text(token, special=True)
            return True
        added = tokenizer.token_text(token)
        self.text += added
        if sampling.stop and len(output) > sampling.min_tokens and self._stopped_by_string(len(added)):
            return True
        if len(output) >= sampling.max_tokens or self.length >= limit:
            self.finish_reason = "length"
            return True
        return False

    def _stopped_by_string(self, added: int) -> bool:
        for stop in self.sampling.stop:
            # Only an end that lies in the new text is a new match.
            at = self.text.find(stop, max(0, len(self.text) - added - len(stop) + 1))
            if at >= 0:
                self.text = self.text[: at + len(stop) if self.sampling.include_stop else at]
                self.finish_reason, self.stop_reason = "stop", stop
                return True
        return False

    @property
    def visible(self) -> int:
        """Characters of the text that can be shown now."""
        return len(self.text) if self.finish_reason else max(0, len(self.text) - self.sampling.hold_back)
