"""Chat completions and text completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.engines.emulated.apis.base import GeneratingApi
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.engines.emulated.settings import EngineSettings


class Chat(GeneratingApi):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request."""
        return read_generation(body, "chat", settings, tokenizer)


class Completions(GeneratingApi):
    """`/v1/completions`."""

    prefix = "cmpl"
    numbered = True

    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request."""
        return read_generation(body, "completion", settings, tokenizer)
