"""Every path that a client may know from an engine or from OpenAI, and what becomes of it here.

Three things can: it is split over stages, it is passed to one instance that can answer it alone, or it is refused
with the reason why several engines behind one endpoint cannot serve it. Nothing that exists elsewhere is a bare 404.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from disagg.engines.base import Api


class Way(StrEnum):
    """What becomes of a request."""

    SPLIT = "split"
    PASSED = "passed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path.

    Attributes:
        path: As the client writes it; a trailing ``/*`` stands for everything below.
        method: The HTTP method that it takes.
        way: What becomes of it.
        about: For people: what it does, or why it is refused.
        api: How it is split, if it is.
    """

    path: str
    method: str
    way: Way
    about: str
    api: Api | None = None


_STATE = "it names state that lives inside one engine process, and there are several behind this endpoint"
_STORE = "nothing is stored here: files, batches and conversations need a store that engines do not have"
_OPERATE = "it changes one engine process; use the admin API, or ask that engine itself"
_MEDIA = "no engine behind this endpoint makes images, speech or video"

_SPLIT = (
    (Api.CHAT, "Chat completions"),
    (Api.COMPLETIONS, "Text completions; a list of prompts becomes one pair of legs per prompt"),
    (Api.RESPONSES, "Responses without stored state"),
    (Api.MESSAGES, "Anthropic's messages"),
    (Api.GENERATE, "Token ids in, token ids out"),
)
_PASSED = {
    "/tokenize": "Text or messages to token ids",
    "/detokenize": "Token ids to text",
    "/v1/messages/count_tokens": "Length of a prompt in Anthropic's form",
    "/v1/chat/completions/render": "The prompt of a chat, as token ids",
    "/v1/completions/render": "The prompts of a completion, as token ids",
    "/v1/responses/render": "The prompt of a response, as token ids",
    "/v1/messages/render": "The prompt of messages, as token ids",
    "/v1/chat/completions/derender": "Token ids to a chat completion",
    "/v1/completions/derender": "Token ids to a completion",
    "/v1/embeddings": "Embeddings, if the model makes them",
    "/v2/embed": "Embeddings in Cohere's form",
    "/pooling": "Raw pooled outputs",
    "/classify": "Classes of texts",
    "/score": "Scores of pairs of texts",
    "/v1/score": "Scores of pairs of texts",
    "/rerank": "Documents in order of relevance",
    "/v1/rerank": "Documents in order of relevance",
    "/v2/rerank": "Documents in order of relevance",
    "/generative_scoring": "Scores from a generative model",
    "/v1/audio/transcriptions": "Speech to text, if the model hears",
    "/v1/audio/translations": "Speech to English text, if the model hears",
    "/cohere/v2/chat": "Chat in Cohere's form",
    "/v1/chat/completions/batch": "Several chats in one request",
}
_REFUSED = {
    "/v1/realtime": "a session over a socket keeps its KV on one engine for its whole life",
    "/v1/responses/*": _STATE,
    "/v1/conversations": _STATE,
    "/v1/conversations/*": _STATE,
    "/v1/chat/completions/*": _STATE,
    "/v1/threads": _STATE,
    "/v1/threads/*": _STATE,
    "/v1/assistants": _STATE,
    "/v1/assistants/*": _STATE,
    "/v1/files": _STORE,
    "/v1/files/*": _STORE,
    "/v1/uploads": _STORE,
    "/v1/uploads/*": _STORE,
    "/v1/batches": _STORE,
    "/v1/batches/*": _STORE,
    "/v1/messages/batches": _STORE,
    "/v1/messages/batches/*": _STORE,
    "/v1/vector_stores": _STORE,
    "/v1/vector_stores/*": _STORE,
    "/v1/containers": _STORE,
    "/v1/containers/*": _STORE,
    "/v1/evals": _STORE,
    "/v1/evals/*": _STORE,
    "/v1/fine_tuning/*": "nothing is trained here",
    "/v1/images/*": _MEDIA,
    "/v1/videos": _MEDIA,
    "/v1/videos/*": _MEDIA,
    "/v1/audio/speech": _MEDIA,
    "/v1/moderations": "no moderation model is served here",
    "/v1/edits": "OpenAI has retired it",
    "/v1/engines": "OpenAI has retired it; see /v1/models",
    "/v1/systemone": _STATE,
    "/generate": "it is SGLang's own API; use /inference/v1/generate or /v1/completions",
    "/invocations": "it guesses the API from the body; call the API's own path",
    "/inference/v1/abort_requests": "engines give their own ids; close the connection to end a request",
    "/abort_requests": "engines give their own ids; close the connection to end a request",
    "/v1/load_lora_adapter": "an adapter has to be on every stage; load it on each engine, then it is served here",
    "/v1/unload_lora_adapter": "an adapter has to be on every stage; unload it on each engine",
    "/sleep": _OPERATE,
    "/wake_up": _OPERATE,
    "/is_sleeping": _OPERATE,
    "/pause": _OPERATE,
    "/resume": _OPERATE,
    "/is_paused": _OPERATE,
    "/reset_prefix_cache": _OPERATE,
    "/reset_mm_cache": _OPERATE,
    "/reset_encoder_cache": _OPERATE,
    "/collective_rpc": _OPERATE,
    "/start_profile": _OPERATE,
    "/stop_profile": _OPERATE,
    "/update_weights": _OPERATE,
    "/scale_elastic_ep": _OPERATE,
    "/server_info": _OPERATE,
    "/tokenizer_info": _OPERATE,
    "/load": _OPERATE,
    "/kv_event_sources": _OPERATE,
}

ENDPOINTS: tuple[Endpoint, ...] = (
    *(Endpoint(api.value, "POST", Way.SPLIT, about, api) for api, about in _SPLIT),
    *(Endpoint(path, "POST", Way.PASSED, about) for path, about in _PASSED.items()),
    *(Endpoint(path, "*", Way.REFUSED, why) for path, why in _REFUSED.items()),
)
"""All of them. The router's own pages (`/health`, `/metrics`, `/version`, `/v1/models`) are not here."""

_EXACT: Mapping[str, Endpoint] = {e.path: e for e in ENDPOINTS if not e.path.endswith("/*")}
_BELOW = tuple((e.path[:-1], e) for e in ENDPOINTS if e.path.endswith("/*"))


def find(path: str) -> Endpoint | None:
    """The endpoint of a path; None if there is no such thing."""
    found = _EXACT.get(path)
    if found is not None:
        return found
    return next((e for start, e in _BELOW if path.startswith(start)), None)
