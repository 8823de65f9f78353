"""Where each client API keeps what a router has to change: its caps, floors, choices and ids.

An API whose cap is overlooked lets prefill decode the whole answer, so there is one table, and a test that every
`disagg.engines.base.Api` is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from disagg.engines.base import Api

_FALSE = msgspec.Raw(b"false")
# A beam search asks the engine again and again, and would not keep the KV of the first time.
_FLOORS = ("min_tokens", "use_beam_search")


@dataclass(frozen=True, slots=True)
class ApiFields:
    """The fields of one API.

    Attributes:
        caps: Keys that limit the answer's length, all of which prefill gets as 1: of several, an engine takes one.
        floors: Keys that make no sense beside a cap of one token, one choice, or without a stream; none shapes the
            prompt.
        choices: Keys that ask for several answers to one prompt; prefill gets 1 for each of them.
        nested: The object that holds caps, floors and choices; None if they are at the top level.
        id_key: The key of the body that names the request inside an engine, where the header does not.
        id_prefix: What such a name begins with.
        ids_key: The key that holds a prompt given as token ids, if it does.
        fixed: Keys that prefill gets with these values.
    """

    caps: tuple[str, ...]
    floors: tuple[str, ...] = ("min_tokens",)
    choices: tuple[str, ...] = ("n", "best_of")
    nested: str | None = None
    id_key: str | None = None
    id_prefix: str = ""
    ids_key: str | None = None
    fixed: Mapping[str, msgspec.Raw] = field(default_factory=lambda: {"stream": _FALSE})


FIELDS: Mapping[Api, ApiFields] = {
    # Chat takes max_completion_tokens before max_tokens when a body has both.
    Api.CHAT: ApiFields(caps=("max_tokens", "max_completion_tokens"), floors=_FLOORS),
    Api.COMPLETIONS: ApiFields(caps=("max_tokens",), floors=_FLOORS, ids_key="prompt"),
    # A stored or background answer lives in one engine's memory, and prefill's is nobody's.
    Api.RESPONSES: ApiFields(
        caps=("max_output_tokens",),
        floors=(),
        choices=(),
        id_key="request_id",
        id_prefix="resp_",
        fixed={"stream": _FALSE, "background": _FALSE, "store": _FALSE},
    ),
    Api.MESSAGES: ApiFields(caps=("max_tokens",), floors=(), choices=()),
    Api.GENERATE: ApiFields(caps=("max_tokens",), choices=("n",), nested="sampling_params", ids_key="token_ids"),
}
