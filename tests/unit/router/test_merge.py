"""What prefill and decode say, as one answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import Api, Body
from disagg.errors import UpstreamProtocolError
from disagg.router.merge import merge_for
from disagg.router.sink import Merge

PROMPT = {
    "tokens": ["Ro", "me"],
    "text_offset": [0, 2],
    "token_logprobs": [None, -1.5],
    "top_logprobs": [None, {"me": -1.5}],
}
OUTPUT = {"tokens": [" is", " big"], "text_offset": [0, 3], "token_logprobs": [-0.25, -0.5], "top_logprobs": [{}, {}]}


def body(**fields: object) -> Body:
    return msgspec.json.decode(json.dumps(fields).encode(), type=Body)


def merge(api: Api = Api.COMPLETIONS, *, counts: bool = False, **fields: object) -> Merge:
    found = merge_for(api, body(**fields), counts_handed_over=counts)
    assert found is not None
    return found


def completion(text: str, logprobs: object = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "length", **more}],
    }


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.CHAT, {"logprobs": True}),
        (Api.COMPLETIONS, {"echo": False, "prompt_logprobs": None}),
        (Api.RESPONSES, {"echo": True}),
        (Api.GENERATE, {"sampling_params": {}}),
    ],
)
def test_what_asks_nothing_of_the_prompt_is_not_looked_at(api: Api, fields: dict[str, Any]) -> None:
    """Merging costs nothing where there is nothing to merge."""
    assert merge_for(api, body(**fields), counts_handed_over=False) is None


def test_the_prompt_stands_before_the_text() -> None:
    """With its tokens and log probabilities, and decode's offsets count on from its end."""
    prefilled = completion("Rome", PROMPT, prompt_logprobs=[None, {"7": 1}])
    answer = completion(" is big", OUTPUT, prompt_logprobs=None)
    merged = json.loads(merge(echo=True).whole(Api.COMPLETIONS, encoded(prefilled), encoded(answer)))
    choice = merged["choices"][0]
    assert choice["text"] == "Rome is big"
    assert choice["logprobs"] == {
        "tokens": ["Ro", "me", " is", " big"],
        "text_offset": [0, 2, 4, 7],
        "token_logprobs": [None, -1.5, -0.25, -0.5],
        "top_logprobs": [None, {"me": -1.5}, {}, {}],
    }
    assert choice["prompt_logprobs"] == [None, {"7": 1}]
    assert list(choice)[:3] == ["index", "text", "logprobs"]


def test_prompt_logprobs_without_echo_leave_the_text_alone() -> None:
    """Prefill's own token is nobody's."""
    prefilled = completion("P's token", prompt_logprobs=[None])
    merged = merge(prompt_logprobs=1).whole(Api.COMPLETIONS, encoded(prefilled), encoded(completion("D's")))
    assert json.loads(merged)["choices"][0]["text"] == "D's"
    assert json.loads(merged)["choices"][0]["prompt_logprobs"] == [None]


def test_a_chat_has_them_at_the_top() -> None:
    """And its choices stay as decode wrote them, byte by byte."""
    answer = b'{"id":"d","choices":[{"a":  1.50}],"prompt_logprobs":null}'
    merged = merge(Api.CHAT, prompt_logprobs=1).whole(Api.CHAT, b'{"choices":[],"prompt_logprobs":[null,{}]}', answer)
    assert merged == b'{"id":"d","choices":[{"a":  1.50}],"prompt_logprobs":[null,{}]}'


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 99}}, {"prompt_tokens_details": {"cached_tokens": 3}}, 3),
        ({"prompt_tokens_details": {"cached_tokens": 99}}, {}, None),
    ],
)
def test_cached_tokens_are_what_prefill_found(
    ours: dict[str, Any], theirs: dict[str, Any], expected: int | None
) -> None:
    """What was handed over was computed, once, and is billed as that."""
    found = merge(counts=True).whole(
        Api.CHAT, encoded({"usage": {"prompt_tokens": 9, **theirs}}), encoded({"usage": {"prompt_tokens": 9, **ours}})
    )
    details = json.loads(found)["usage"]["prompt_tokens_details"]
    assert (details and details["cached_tokens"]) == expected


@pytest.mark.parametrize("broken", [b"", b"[]", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":5}'])
def test_answers_that_are_none_are_an_engines_fault(broken: bytes) -> None:
    """Not a crash of ours, and not half an answer."""
    good = encoded(completion("x"))
    for pair in ((broken, good), (good, broken)):
        if pair[1] == b'{"choices":[]}':
            continue
        with pytest.raises(UpstreamProtocolError):
            merge(echo=True).whole(Api.COMPLETIONS, *pair)


EVENTS = [
    b'data: {"id":"x","choices":[{"index":0,"text":" is","logprobs":{"tokens":[" is"],"text_offset":[0],'
    b'"token_logprobs":[-1],"top_logprobs":[{}]}}]}\n\n',
    b'data: {"id":"x","choices":[{"index":0,"text":" big","logprobs":{"tokens":[" big"],"text_offset":[3],'
    b'"token_logprobs":[-2],"top_logprobs":[{}]}}]}\n\n',
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]


@given(cuts=st.sets(st.integers(1, 3)))
def test_a_stream_begins_with_the_prompt(cuts: set[int]) -> None:
    """However its events are grouped: the first has the prompt, all have their place after it, the end is whole."""
    change = merge(echo=True).stream(Api.COMPLETIONS, encoded(completion("Rome", PROMPT)))
    edges = [0, *sorted(cuts), len(EVENTS)]
    out = b"".join(change(b"".join(EVENTS[a:b])) for a, b in pairwise(edges))
    blocks = out.split(b"\n\n")
    assert blocks[-3:] == [EVENTS[2].rstrip(), b"data: [DONE]", b""]
    first, second = (json.loads(b.removeprefix(b"data: "))["choices"][0] for b in blocks[:2])
    assert (first["text"], second["text"]) == ("Rome is", " big")
    assert (first["logprobs"]["text_offset"], second["logprobs"]["text_offset"]) == ([0, 2, 4], [7])
    assert first["logprobs"]["token_logprobs"] == [None, -1.5, -1]


def test_the_rest_of_a_stream_passes_unread() -> None:
    """Once the prompt is out, and nothing has to be counted, bytes are the engine's."""
    change = merge(echo=True).stream(Api.COMPLETIONS, encoded(completion("Rome")))
    change(b'data: {"choices":[{"text":" is"}]}\n\n')
    odd = b'data:   {"choices" : [ ]}\n\ndata: no json\n\n'
    assert change(odd) is odd


def test_a_streams_usage_tells_prefills_cache_hits() -> None:
    """Other events are not touched."""
    prefilled = b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}'
    change = merge(Api.CHAT, counts=True, messages=[]).stream(Api.CHAT, prefilled)
    plain = b'data: {"choices": [{}]}\n\n'
    assert change(plain) is plain
    last = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    assert change(last) == last.replace(b"8", b"3")


def test_a_stream_after_a_broken_prefill_answer_does_not_begin() -> None:
    """The client gets an error rather than an answer without its prompt."""
    with pytest.raises(UpstreamProtocolError):
        merge(echo=True).stream(Api.COMPLETIONS, b'{"choices":[]}')


def test_a_messages_bill_counts_what_prefill_found_and_what_it_computed() -> None:
    """Its input is the prompt without what was cached: decode, which was handed all of it, would bill nothing."""
    prefilled = {"usage": {"input_tokens": 30, "output_tokens": 1, "cache_read_input_tokens": 4}}
    decoded = {"usage": {"input_tokens": 0, "output_tokens": 7, "cache_read_input_tokens": 34}}
    wanted = {"input_tokens": 30, "output_tokens": 7, "cache_read_input_tokens": 4}
    chosen = merge(Api.MESSAGES, counts=True)
    whole = chosen.whole(Api.MESSAGES, encoded(prefilled), encoded(decoded))
    assert json.loads(whole)["usage"] == wanted
    change = chosen.stream(Api.MESSAGES, encoded(prefilled))
    event = b"event: message_delta\ndata: " + encoded({"type": "message_delta", **decoded}) + b"\n\n"
    head, _, data = change(event).partition(b"data: ")
    assert head == b"event: message_delta\n"
    assert json.loads(data)["usage"] == wanted


def test_the_event_that_ends_a_response_tells_prefills_cache_hits() -> None:
    """Its usage is inside of the response that the event holds."""
    details = "input_tokens_details"
    prefilled = {"usage": {"input_tokens": 34, details: {"cached_tokens": 4}}}
    ended = {
        "type": "response.completed",
        "response": {"usage": {"input_tokens": 34, details: {"cached_tokens": 34}}},
    }
    change = merge(Api.RESPONSES, counts=True).stream(Api.RESPONSES, encoded(prefilled))
    event = change(b"event: response.completed\ndata: " + encoded(ended) + b"\n\n")
    told = json.loads(event.partition(b"data: ")[2])["response"]["usage"]
    assert told == {"input_tokens": 34, details: {"cached_tokens": 4}}
