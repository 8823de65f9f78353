"""Two answers become one, where a part of what the client asked for is prefill's to give.

================================  =======================================================================
the prompt of `echo`              prefill's, in front of decode's text; its tokens and log probabilities too
`prompt_logprobs`                 prefill's; decode was not asked, it would compute the whole prompt again
cached prompt tokens              prefill's, where decode counts what it was handed as cached; several choices of one
                                  prompt always find it there
everything else                   decode's, byte by byte
================================  =======================================================================

A request that wants none of this has no `disagg.router.sink.Merge`, and its answer is not looked at.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.errors import UpstreamProtocolError
from disagg.router.sink import Merge, StreamFilter

Fields = dict[str, msgspec.Raw]

_CACHED = (b'"cached_tokens"', b'"cache_read_input_tokens"')
_CACHED_KEYS = ("prompt_tokens_details", "input_tokens_details")
# Messages count input without what was found in the cache, so these change together.
_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_NULL = msgspec.Raw(b"null")
_LISTS = ("token_logprobs", "tokens", "top_logprobs")
_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_numbers = msgspec.json.Decoder(list[int])
_strings = msgspec.json.Decoder(list[str])
_text = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


def merge_for(api: Api, body: Body, *, counts_handed_over: bool) -> Merge | None:
    """What has to be merged for a request that is split; None if nothing has.

    Args:
        api: What the client called.
        body: What it sent.
        counts_handed_over: Decode reports tokens that it was handed as found in its cache.
    """
    wants_prompt = api in {Api.CHAT, Api.COMPLETIONS} and bodies.wants_prompt(api, body)
    if not (wants_prompt or counts_handed_over):
        return None
    echoed = "echo" in body and bodies.is_true(body, "echo")
    echo = echoed and api is Api.COMPLETIONS
    plan = _Plan(wants_prompt, echo, counts_handed_over, bodies.choices_per_prompt(api, body))
    return Merge(partial(_merge_whole, plan), partial(_merge_stream, plan))


class _Plan(NamedTuple):
    """What has to be merged, something of the prompt, its text, the number of cached tokens; and how many choices."""

    prompt: bool
    echo: bool
    cached: bool
    choices: int


def _merge_whole(plan: _Plan, api: Api, prefilled: bytes, answer: bytes) -> bytes:
    """Two whole answers as one.

    Raises:
        UpstreamProtocolError: If one of them is not what its API says.
    """
    try:
        return _merged(plan, api, prefilled, answer)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError) as error:
        raise UpstreamProtocolError(f"The answers of prefill and decode cannot be put together: {error}.") from error


def _merged(plan: _Plan, api: Api, prefilled: bytes, answer: bytes) -> bytes:
    ours, theirs = _object.decode(answer), _object.decode(prefilled)
    if plan.cached:
        _merge_cached(ours, theirs)
    if "prompt_logprobs" in theirs:
        ours["prompt_logprobs"] = theirs["prompt_logprobs"]
    if plan.prompt and api is Api.COMPLETIONS:
        choices, sources = _choices.decode(ours["choices"]), _choices.decode(theirs["choices"])
        for choice in choices:
            choice["prompt_logprobs"] = sources[0].get("prompt_logprobs", _NULL)
            if plan.echo:
                Echo(sources[0]).put_before(choice)
        ours["choices"] = msgspec.Raw(_encode(choices))
    return _encode(ours)


def _merge_stream(plan: _Plan, api: Api, prefilled: bytes) -> StreamFilter:
    """The filter for decode's stream. Of an echoed prompt it gives the text, not the ids: prefill does not tell both.

    Raises:
        UpstreamProtocolError: If prefill's answer is not what its API says.
    """
    del api  # the plan knows what it needs
    try:
        theirs = _object.decode(prefilled)
        echo = Echoes(_choices.decode(theirs["choices"])[0], plan.choices) if plan.echo else None
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError) as error:
        raise UpstreamProtocolError(f"Prefill's answer cannot be put before decode's: {error}.") from error

    def change(data: bytes) -> bytes:
        if (echo is None or echo.done) and not (plan.cached and any(key in data for key in _CACHED)):
            return data
        return b"".join(
            _change_event(event, theirs if plan.cached else None, echo) for event in data.split(b"\n\n") if event
        )

    return change


def _change_event(event: bytes, theirs: Fields | None, echo: Echoes | None) -> bytes:
    """One event, without its blank line; what is no JSON object stays as it is."""
    head, mark, data = event.partition(b"data: ")
    try:
        fields = _object.decode(data)
        if theirs is not None:
            _merge_cached(fields, theirs, brief=True)
            # The event that ends a response holds it whole.
            whole = _object_at(fields, "response")
            if whole is not None:
                _merge_cached(whole, theirs)
                fields["response"] = msgspec.Raw(_encode(whole))
        if echo is not None and "choices" in fields:
            choices = _choices.decode(fields["choices"])
            for choice in choices:
                echo.put_before(choice)
            fields["choices"] = msgspec.Raw(_encode(choices))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return event + b"\n\n"
    return head + mark + _encode(fields) + b"\n\n"


def _merge_cached(ours: Fields, theirs: Fields, *, brief: bool = False) -> None:
    """Cached tokens are what prefill found in its cache, never what was handed over. A stream leaves nulls out."""
    usage, source = _object_at(ours, "usage"), _object_at(theirs, "usage")
    if usage is None or source is None:
        return
    for key in (*_CACHED_KEYS, *(_PARTS if "cache_read_input_tokens" in usage else ())):
        if key not in usage:
            continue
        usage[key] = source.get(key, _NULL)
        details = _object_at(usage, key) if brief else None
        if details is not None:
            known = {name: value for name, value in details.items() if bytes(value) != b"null"}
            usage[key] = msgspec.Raw(_encode(known))
    ours["usage"] = msgspec.Raw(_encode(usage))


def _object_at(fields: Fields, key: str) -> Fields | None:
    try:
        return _object.decode(fields[key])
    except (KeyError, msgspec.ValidationError):
        return None


class Echo:
    """What prefill tells of the prompt in a text completion: nothing but the prompt, as its leg asked for no more.

    Args:
        source: The choice of prefill's answer, of a leg that echoed.
    """

    def __init__(self, source: Fields) -> None:
        self._text = _text.decode(source["text"])
        self._logprobs = _object_at(source, "logprobs")
        self._shift = 0
        self._told = False
        if self._logprobs is not None:
            offsets, tokens = (
                _numbers.decode(self._logprobs["text_offset"]),
                _strings.decode(self._logprobs["tokens"]),
            )
            self._shift = offsets[-1] + len(tokens[-1]) if tokens else 0

    @property
    def goes_on(self) -> bool:
        """Every piece has a place in the text, which the prompt changes."""
        return self._logprobs is not None

    def put_before(self, choice: Fields) -> None:
        """Change a choice, or the next piece of one: the first gets the prompt, all get their place after it."""
        ours = _object_at(choice, "logprobs")
        if ours is not None and self._logprobs is not None:
            offsets = [offset + self._shift for offset in _numbers.decode(ours["text_offset"])]
            if not self._told:
                offsets = _numbers.decode(self._logprobs["text_offset"]) + offsets
                for key in _LISTS:
                    ours[key] = _joined(self._logprobs.get(key, _NULL), ours.get(key, _NULL))
            ours["text_offset"] = msgspec.Raw(_encode(offsets))
            choice["logprobs"] = msgspec.Raw(_encode(ours))
        if not self._told:
            choice["text"] = msgspec.Raw(_encode(self._text + _text.decode(choice["text"])))
        self._told = True


class Echoes:
    """The same for the pieces of several choices, told apart by their index.

    Args:
        source: The choice of prefill's answer.
        choices: How many there will be.
    """

    def __init__(self, source: Fields, choices: int) -> None:
        self._source = source
        self._choices = choices
        self._by_index: dict[bytes, Echo] = {}

    @property
    def done(self) -> bool:
        """The rest of the stream needs no change."""
        return len(self._by_index) >= self._choices and not any(e.goes_on for e in self._by_index.values())

    def put_before(self, choice: Fields) -> None:
        """Change the next piece of a choice."""
        index = bytes(choice.get("index", _NULL))
        echo = self._by_index.get(index)
        if echo is None:
            echo = self._by_index[index] = Echo(self._source)
        echo.put_before(choice)


def _joined(first: msgspec.Raw, second: msgspec.Raw) -> msgspec.Raw:
    """Two lists as one; null if there is none."""
    lists = [bytes(raw) for raw in (first, second)]
    if b"null" in lists:
        return msgspec.Raw(next((raw for raw in lists if raw != b"null"), b"null"))
    return msgspec.Raw(_encode([*_items.decode(lists[0]), *_items.decode(lists[1])]))
