"""Embeddings, scores and rankings, for an engine that was started with `--runner pooling`.

A vector is a function of the tokens alone: equal texts have equal vectors, and a score of 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from disagg.engines.emulated.fields import Fields, problem, schema_error
from disagg.engines.emulated.model import Tokenizer, ToyModel, mix
from disagg.engines.emulated.prompts import check_length
from disagg.engines.emulated.requests import Generation, choose_model
from disagg.engines.emulated.settings import EngineSettings

PATHS = frozenset(
    {
        *("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    }
)
_DIMENSIONS = 32


def pool(path: str, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Answer one request.

    Raises:
        ClientError: If it is not valid.
    """
    choose_model(Generation(chat=False), Fields(body).text("model"), settings)
    reader = _Reader(settings, tokenizer)
    if path.endswith("rerank"):
        return reader.rerank(body)
    if path.endswith("score"):
        return reader.score(body)
    return reader.embed(body, flat=path != "/pooling")


class _Reader:
    """Texts of one request, and the tokens that they cost."""

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._model = ToyModel.named(settings.model)
        self._tokens = 0

    def embed(self, body: Mapping[str, Any], *, flat: bool) -> dict[str, Any]:
        """A vector for each input."""
        given = _required(body, "input")
        several = isinstance(given, list) and not all(isinstance(item, int) for item in given)
        vectors = [self._vector(item) for item in (given if several and isinstance(given, list) else [given])]
        kind = "embedding" if flat else "data"
        data = [
            {"index": index, "object": "embedding" if flat else "pooling", kind: vector}
            for index, vector in enumerate(vectors)
        ]
        return self._answer("embd" if flat else "pool", {"object": "list", "data": data})

    def score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """How alike two texts are, for each pair."""
        first, second = _texts(_required(body, "text_1")), _texts(_required(body, "text_2"))
        if len(first) == 1:
            first = list(first) * len(second)
        pairs = zip(first, second, strict=False)
        data = [
            {"index": index, "object": "score", "score": self._alike(left, right)}
            for index, (left, right) in enumerate(pairs)
        ]
        return self._answer("score", {"object": "list", "data": data})

    def rerank(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Documents by their likeness to a query, most alike first."""
        query, documents = str(_required(body, "query")), _texts(_required(body, "documents"))
        scored = [(self._alike(query, text), index, text) for index, text in enumerate(documents)]
        scored.sort(key=lambda item: (-item[0], item[1]))
        top = body.get("top_n") or len(scored)
        results = [
            {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": score}
            for score, index, text in scored[:top]
        ]
        return self._answer("rerank", {"results": results})

    def _answer(self, prefix: str, rest: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        head = {"id": f"{prefix}-{uuid4().hex}", "created": int(time.time())}
        return {**head, "model": self._settings.served_model_names[0], **rest, "usage": usage}

    def _vector(self, item: object) -> list[float]:
        tokens = list(item) if isinstance(item, list) else self._tokenizer.encode(str(item))
        check_length(tokens, self._settings.max_model_len, from_text=isinstance(item, str))
        self._tokens += len(tokens)
        seed = self._model.extend(0, tokens)[-1]
        raw = [mix(seed + n) / 2**63 - 1.0 for n in range(_DIMENSIONS)]
        norm = math.sqrt(sum(value * value for value in raw))
        return [value / norm for value in raw]

    def _alike(self, left: str, right: str) -> float:
        return sum(a * b for a, b in zip(self._vector(left), self._vector(right), strict=True))


def _required(body: Mapping[str, Any], name: str) -> object:
    value = body.get(name)
    if value is None:
        raise schema_error(problem("missing", f"body.{name}", "Field required", dict(body)))
    return value


def _texts(value: object) -> Sequence[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
