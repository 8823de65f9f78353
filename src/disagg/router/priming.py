"""A request of several choices: its KV is handed over by a leg of its own, the priming leg.

::

    prefill leg -> handle -> priming leg: one token, with the handle -> the client's body, without it, same engine
                             '- the prompt's KV enters decode's prefix cache, where every choice finds it

A handle can be read once, so the choices cannot share it. Decode finds whole blocks, and never the last token of a
prompt: one of a single block, or a cache that is off, gains nothing, and such a request is decode's alone.
"""

from __future__ import annotations

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.errors import HandoffError, UpstreamProtocolError
from disagg.http.messages import Answer
from disagg.router.delivery import Stream
from disagg.router.fleet import Member
from disagg.router.legs import Failure
from disagg.router.steps import Sending, Steps

NO_CACHE = "no-prefix-cache"
SHORT = "within-one-block"


class Priming:
    """What is different about the legs of such a request.

    Args:
        steps: Sends the client's own body.
        why: What makes several choices of it, as a short slug.

    Attributes:
        why: The same.
        carrying: Sends the leg that fetches the KV, and prefill's where the two leave together.
    """

    def __init__(self, steps: Steps, why: str) -> None:
        intake = steps.intake
        api, body = intake.api, intake.body
        self.why = why
        cache_key = steps.route.new_key()
        self.carrying = msgspec.structs.replace(
            steps,
            intake=msgspec.structs.replace(intake, body=bodies.priming(api, body), stream=False),
            primes=True,
            cache_key=cache_key,
        )
        own = msgspec.structs.replace(intake, body=bodies.about_the_answer(api, body))
        self._answering = msgspec.structs.replace(steps, intake=own, cache_key=cache_key)
        self._caches = steps.route.caches
        self._most_tokens = _most_tokens(api, intake.body)

    async def obstacle(self, decode: Member, prompt_tokens: int = 0) -> str | None:
        """Why `decode` would not find the KV, as a short slug; None if it would, as far as that is known.

        Args:
            decode: Who answers.
            prompt_tokens: Length of the prompt as prefill has counted it; 0 before.
        """
        cache = await self._caches.of(decode)
        if cache.off:
            return NO_CACHE
        most = prompt_tokens or self._most_tokens
        return SHORT if 0 < most <= cache.block_size else None

    async def answer(self, decode: Member) -> Answer | Stream | Failure:
        """Let `decode`, which has the KV, answer the client."""
        route = self._answering.route
        if not route.legs.fleet.is_current(decode):
            gone = HandoffError(f"Decode instance {decode.name} was gone when it had fetched the KV.")
            return Failure(decode.stage, decode.name, "unreachable", retry=True, error=gone)
        return await self._answering.decode(decode, route.new_key(), None, None, Sending(0.0))


def failure_of(outcome: Answer | Stream | Failure, decode: Member) -> Failure | None:
    """What is wrong with the outcome of a priming leg; None if the KV is there."""
    if isinstance(outcome, Stream):
        outcome.leg.outcome = "broken"
        outcome.leg.close()
        error = UpstreamProtocolError(f"Decode instance {decode.name} streamed what was asked for as a whole.")
        return Failure(decode.stage, decode.name, "broken", retry=True, error=error)
    return outcome if isinstance(outcome, Failure) else None


def _most_tokens(api: Api, body: Body) -> int:
    """How many tokens a prompt can have at most, if that is easily told; 0 if not."""
    ids = bodies.prompt_ids(api, body)
    if ids is not None:
        return ids
    text = body.get("prompt") if api is Api.COMPLETIONS else None
    # No token is shorter than a byte, and the quotes make up for what is put in front of a text. A chat's template
    # may add any number.
    return memoryview(text).nbytes if text is not None and bytes(memoryview(text)[:1]) == b'"' else 0
