"""What one HTTP request asks the engine to generate, checked as vLLM checks it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from disagg.engines.emulated.fields import Fields, problem, rejected
from disagg.engines.emulated.model import VOCAB_SIZE, Tokenizer, mix
from disagg.engines.emulated.prompts import chat_tokens, check_length, completion_prompts, given_tokens
from disagg.engines.emulated.sequence import Sampling
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import BadRequestError, UnknownModelError

_MAX_LOGPROBS = 20
_GREEDY = 1e-5
_UNSUPPORTED = ("structured_outputs", "suffix", "prompt_embeds", "documents", "chat_template", "logprob_token_ids")


@dataclass(slots=True)
class Generation:
    """A checked request.

    Attributes:
        chat: Chat completion, else text completion.
        prompts: Tokens of each prompt; chat has one.
        echoed: Text that is repeated in front of the answer, for each prompt.
        samplings: Sampling of each choice of a prompt.
        stream: Answer as server-sent events.
        include_usage: End the stream with a usage chunk.
        continuous_usage: Put usage into every chunk.
        logprobs: How many alternatives to report per token; None reports no log probabilities.
        prompt_logprobs: The same for the prompt.
        only_echo: Nothing but the prompt is wanted (`max_tokens` 0).
        return_token_ids: Add token ids to the answer.
        role: Role of the answer's message.
        kv_params: Handoff parameters as sent.
        cache_salt: Separates prefix caches.
    """

    chat: bool
    prompts: list[list[int]] = field(default_factory=list)
    echoed: list[str] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    only_echo: bool = False
    return_token_ids: bool = False
    role: str = "assistant"
    kv_params: dict[str, Any] | None = None
    cache_salt: str = ""


def read_generation(
    body: Mapping[str, Any], api: Literal["chat", "completion"], settings: EngineSettings, tokenizer: Tokenizer
) -> Generation:
    """Check a request in the order in which vLLM does: schema, model, prompt, sampling.

    Raises:
        BadRequestError: If it is not valid, or asks for what this engine cannot do.
        UnknownModelError: If it names another model.
    """
    chat = api == "chat"
    fields = Fields(body)
    out = Generation(chat=chat, kv_params=fields.mapping("kv_transfer_params"))
    out.stream = fields.flag("stream")
    out.return_token_ids = fields.flag("return_token_ids")
    out.cache_salt = fields.text("cache_salt") or ""
    _read_stream_options(out, fields)
    _read_logprobs(out, fields)
    draft = _Draft(fields)
    echo = fields.flag("echo")
    model = fields.text("model")
    _refuse_unsupported(body)
    if chat and body.get("messages") is None:
        fields.problems.insert(0, problem("missing", "body.messages", "Field required", dict(body)))
    fields.done()
    if model and model not in settings.served_model_names:
        valid = ", ".join(settings.served_model_names)
        raise UnknownModelError(f"The model `{model}` does not exist. Valid aliases: {valid}.", param="model")
    _check_tools(body, fields)
    _read_prompts(out, body, settings, tokenizer, echo=echo)
    draft.finish(out, settings, max(map(len, out.prompts)), echo=echo)
    return out


def _read_stream_options(out: Generation, fields: Fields) -> None:
    options = fields.mapping("stream_options")
    if not options:
        return
    if not out.stream:
        raise rejected("Stream options can only be defined when `stream=True`.", "stream_options")
    nested = Fields(options)
    out.include_usage = nested.flag("include_usage", default=True)
    out.continuous_usage = out.include_usage and nested.flag("continuous_usage_stats")
    fields.problems += nested.problems


def _read_logprobs(out: Generation, fields: Fields) -> None:
    body = fields.body
    for name in ("prompt_logprobs", "top_logprobs" if out.chat else "logprobs"):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise rejected(f"`{name}` must be an integer.", name, value)
        if value is not None and value < 0:
            raise rejected(f"`{name}` must be a positive value or -1.", name, value)
    prompt = out.prompt_logprobs = fields.integer("prompt_logprobs")
    if prompt is not None and out.stream and prompt > 0:
        raise rejected("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if out.chat:
        top = fields.integer("top_logprobs") or 0
        wanted = fields.flag("logprobs")
        if top and not wanted:
            raise rejected("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        out.logprobs = top if wanted else None
    else:
        out.logprobs = fields.integer("logprobs")
    for name, count in (("sample logprobs", out.logprobs), ("prompt logprobs", prompt)):
        if count is not None and count > _MAX_LOGPROBS:
            message = f"Requested {name} of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
            raise rejected(message, "logprobs" if name.startswith("sample") else "prompt_logprobs", count)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """What the toy model cannot do is refused, not ignored."""
    found = [name for name in _UNSUPPORTED if body.get(name)]
    if body.get("use_beam_search"):
        found.append("use_beam_search")
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        found.append("response_format")
    if found:
        raise BadRequestError(f"The emulated engine does not support {', '.join(found)}.", param=found[0])


def _check_tools(body: Mapping[str, Any], fields: Fields) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if isinstance(tools, list) and not tools:
        raise rejected(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    if choice not in (None, "none") and not tools:
        raise rejected("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if tools and choice in (None, "auto"):
        raise BadRequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    if tools and choice != "none":
        raise BadRequestError("The emulated engine does not support a forced tool_choice.", param="tool_choice")


def _read_prompts(
    out: Generation, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer, *, echo: bool
) -> None:
    limit = settings.max_model_len
    given = given_tokens(out.kv_params) if out.chat and not echo else None
    if given is not None:
        check_length(given, limit, from_text=False)
        out.prompts = [given]
    elif out.chat:
        tokens = chat_tokens(body, tokenizer)
        check_length(tokens, limit, from_text=True)
        out.prompts = [tokens]
    else:
        for tokens, text in completion_prompts(body, tokenizer):
            check_length(tokens, limit, from_text=text is not None)
            out.prompts.append(tokens)
            if echo:
                out.echoed.append(tokenizer.decode(tokens) if text is None else text)
    if out.chat and not body.get("add_generation_prompt", True):
        out.role = body["messages"][-1]["role"] if body["messages"] else "assistant"
    if out.chat and echo:
        last = body["messages"][-1] if body["messages"] else {}
        same = last.get("role") == out.role and isinstance(last.get("content"), str)
        out.echoed = [last["content"] if same else ""]


class _Draft:
    """Sampling fields as sent; they are checked after the prompt, as vLLM does."""

    def __init__(self, fields: Fields) -> None:
        self.max_name = (
            "max_completion_tokens" if fields.body.get("max_completion_tokens") is not None else "max_tokens"
        )
        self.max_tokens = fields.integer(self.max_name)
        self.min_tokens = fields.integer("min_tokens") or 0
        n = fields.integer("n")
        self.n = 1 if n is None else n
        self.seed = fields.integer("seed")
        temperature = fields.number("temperature")
        self.temperature = 1.0 if temperature is None else temperature
        top_p = fields.number("top_p")
        self.top_p = 1.0 if top_p is None else top_p
        self.stop = fields.strings("stop")
        self.stop_token_ids = frozenset(fields.integers("stop_token_ids"))
        self.include_stop = fields.flag("include_stop_str_in_output")
        self.ignore_eos = fields.flag("ignore_eos")
        self.allowed = fields.integers("allowed_token_ids")
        self.bias = fields.mapping("logit_bias") or {}

    def finish(self, out: Generation, settings: EngineSettings, longest: int, *, echo: bool) -> None:
        """Check the values and make one sampling per choice."""
        limit = settings.max_model_len
        asked = self.max_tokens if self.max_tokens is not None else None if out.chat else 16
        if asked is not None and asked > limit:
            raise rejected(
                f"{self.max_name}={asked} cannot be greater than max_model_len={limit}. "
                "Please request fewer output tokens.",
                self.max_name,
                asked,
            )
        out.only_echo = echo and asked == 0 and not out.chat
        # The context limit ends a sequence by itself: with several prompts each has its own room.
        room = limit - longest
        max_tokens = room if asked is None else min(asked, room)
        if out.only_echo:
            max_tokens = 1
        self._check(max_tokens)
        forced, banned = self._biased()
        greedy = self.temperature < _GREEDY
        for choice in range(self.n):
            salt = 0 if greedy or (self.seed is None and choice == 0) else mix((self.seed or 0) * 1009 + choice + 1)
            out.samplings.append(
                Sampling(
                    max_tokens=max_tokens,
                    min_tokens=self.min_tokens,
                    salt=salt,
                    stop=self.stop,
                    stop_token_ids=self.stop_token_ids,
                    include_stop=self.include_stop,
                    ignore_eos=self.ignore_eos,
                    forced=forced,
                    banned=banned,
                    record=out.logprobs is not None,
                    prompt_logprobs=out.prompt_logprobs is not None or (echo and out.logprobs is not None),
                )
            )

    def _check(self, max_tokens: int) -> None:
        if self.n < 1:
            raise rejected(f"n must be at least 1, got {self.n}.")
        if self.n > 16384:
            raise rejected(f"n must be at most 16384, got {self.n}.")
        if not math.isfinite(self.temperature):
            raise rejected(f"temperature must be a finite number, got {self.temperature}.", "temperature")
        if self.temperature < 0.0:
            message = f"temperature must be non-negative, got {self.temperature}."
            raise rejected(message, "temperature", self.temperature)
        if self.temperature > 2.0:
            message = f"temperature must be in [0, 2], got {self.temperature}."
            raise rejected(message, "temperature", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise rejected(f"top_p must be in (0, 1], got {self.top_p}.", "top_p", self.top_p)
        if max_tokens < 1:
            raise rejected(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
        if self.min_tokens < 0:
            raise rejected(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.")
        if self.min_tokens > max_tokens:
            raise rejected(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {self.min_tokens}."
            )
        if any(not stop for stop in self.stop):
            raise rejected("stop cannot contain an empty string.")
        if self.temperature < _GREEDY and self.n > 1:
            raise rejected(f"n must be 1 when using greedy sampling, got {self.n}.")

    def _biased(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """Tokens that are forced and that are banned. A bias decides only at its ends, +100 and -100."""
        try:
            bias = {int(token): float(value) for token, value in self.bias.items()}
        except (TypeError, ValueError) as error:
            raise rejected("logit_bias must map token ids to numbers.", "logit_bias") from error
        if any(not 0 <= token < VOCAB_SIZE for token in (*bias, *self.allowed)):
            raise rejected(
                f"Token ids must be from 0 to {VOCAB_SIZE - 1}.", "logit_bias" if bias else "allowed_token_ids"
            )
        forced = tuple(token for token, value in bias.items() if value >= 100) or tuple(self.allowed)
        banned = frozenset(token for token, value in bias.items() if value <= -100)
        return forced, banned
