"""What one HTTP request asks the engine to generate, checked as vLLM checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from disagg.engines.emulated.constraints import FREE, Constraint, read_constraint
from disagg.engines.emulated.fields import Fields, problem, rejected
from disagg.engines.emulated.model import Tokenizer, ToyModel
from disagg.engines.emulated.prompts import chat_tokens, check_length, check_text, completion_prompts, given_tokens
from disagg.engines.emulated.sampling import SamplingDraft
from disagg.engines.emulated.sequence import Sampling
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import BadRequestError, UnknownModelError

_MAX_LOGPROBS = 20
_UNSUPPORTED = ("prompt_embeds", "documents", "chat_template", "logprob_token_ids")


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
        constraint: The shape that the answer has to have.
        model: Name of the model in the answer.
        adapter: Weights of the adapter that was asked for.
        priority: Lower ones are served first, where priorities count.
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
    constraint: Constraint = FREE
    model: str = ""
    adapter: ToyModel | None = None
    priority: int = 0


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
    draft = SamplingDraft(fields, chat=chat)
    echo = fields.flag("echo")
    model = fields.text("model")
    fields.not_null("min_tokens", "ignore_eos", "include_stop_str_in_output", *(("echo",) if chat else ("n",)))
    if body.get("cache_salt") == "":
        raise rejected("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    _refuse_unsupported(body)
    if chat and body.get("messages") is None:
        fields.problems.insert(0, problem("missing", "body.messages", "Field required", dict(body)))
    out.priority = fields.integer("priority") or 0
    fields.done()
    choose_model(out, model, settings)
    out.constraint = read_constraint(body, settings, tokenizer, chat=chat)
    _read_prompts(out, body, settings, tokenizer, echo=echo)
    draft.check_length(settings.max_model_len)
    out.only_echo = echo and draft.asked == 0 and not chat
    if echo and out.prompt_logprobs is None:
        out.prompt_logprobs = (out.logprobs or 0) if chat else out.logprobs
    # The context limit ends a sequence by itself: with several prompts each has its own room.
    room = settings.max_model_len - max(map(len, out.prompts))
    out.samplings = draft.samplings(
        1 if out.only_echo else draft.limit(room),
        record=out.logprobs is not None,
        prompt_logprobs=out.prompt_logprobs is not None,
        script=out.constraint.script,
    )
    return out


def choose_model(out: Generation, model: str | None, settings: EngineSettings) -> None:
    """Set the model that a request names; without a name it is the first that is served.

    Raises:
        UnknownModelError: If it is not served here.
    """
    names = settings.served_model_names
    out.model = names[0]
    if not model or model in names:
        return
    if any(model == name for name, _ in settings.lora_modules):
        out.model = model
        out.adapter = ToyModel.named(f"{settings.model}+{model}", settings.mean_output_tokens)
        out.cache_salt = f"{out.cache_salt}\0{model}"
        return
    raise UnknownModelError(f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}.", param="model")


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
    if body.get("suffix"):
        raise BadRequestError("suffix is only supported for models with FIM completion rendering", param="suffix")
    found = [name for name in _UNSUPPORTED if body.get(name)]
    if body.get("use_beam_search"):
        found.append("use_beam_search")
    if found:
        raise BadRequestError(f"The emulated engine does not support {', '.join(found)}.", param=found[0])


def _read_prompts(
    out: Generation, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer, *, echo: bool
) -> None:
    limit = settings.max_model_len
    given = given_tokens(out.kv_params) if out.chat and not echo else None
    if given is not None:
        check_length(given, limit, from_text=False)
        out.prompts = [given]
    elif out.chat:
        tokens = chat_tokens(body, tokenizer, settings.served_model_names[0])
        check_length(tokens, limit, from_text=True)
        out.prompts = [tokens]
    else:
        for tokens, text in completion_prompts(body, tokenizer):
            check_text(text or "", limit)
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
