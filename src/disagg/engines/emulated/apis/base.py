"""What the server needs to know of an API that generates."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from disagg.engines.emulated.answers import OpenAiForm
from disagg.engines.emulated.form import Form, Identity
from disagg.engines.emulated.model import Tokenizer
from disagg.engines.emulated.requests import Generation
from disagg.engines.emulated.settings import EngineSettings
from disagg.errors import DisaggError
from disagg.http.messages import Answer, error_object, json_answer


class GeneratingApi(ABC):
    """One endpoint that generates.

    Attributes:
        prefix: What the answer's id begins with, before the id that the caller gave.
        numbered: Inside the engine each prompt of a request has a number.
    """

    prefix: ClassVar[str]
    numbered: ClassVar[bool] = False

    @abstractmethod
    def read(self, body: Mapping[str, Any], settings: EngineSettings, tokenizer: Tokenizer) -> Generation:
        """Check a request.

        Raises:
            ClientError: If it is not valid, or asks for what this engine cannot do.
        """

    def identify(
        self, given: str | None, body: Mapping[str, Any], model: str, fingerprint: str, *, details: bool
    ) -> Identity:
        """What the answer repeats, from the request's own id if it has one."""
        name = f"{self.prefix}-{given or body.get('request_id') or os.urandom(16).hex()}"
        return Identity(name, name, int(time.time()), model, fingerprint, details, self.numbered)

    def form(self, generation: Generation, identity: Identity, body: Mapping[str, Any], tokenizer: Tokenizer) -> Form:
        """Who writes the answer."""
        del body
        return OpenAiForm(generation, identity, tokenizer)

    def refused(self, error: DisaggError) -> Answer:
        """The answer to a request that is not served."""
        return json_answer(error.status, error_object(error))
