"""`disagg.router.recovery` and `recoverable`: what passes, what is counted, and what cannot go on."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.base import Api, Body
from disagg.router.recoverable import why_not
from disagg.router.recovery import Recovery, with_prompt_ids


def body(**fields: Any) -> Body:
    return msgspec.json.decode(json.dumps(fields).encode(), type=Body)


def event(text: str, ids: list[int], **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "token_ids": ids, **more}
    return b"data: " + json.dumps({"id": "a", "created": 1, "choices": [choice]}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("api", "fields", "reason"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 3}, None),
        (Api.COMPLETIONS, {"prompt": "x", "stop": None, "presence_penalty": 0, "n": 1}, None),
        (Api.CHAT, {"response_format": {"type": "text"}, "tools": []}, None),
        (Api.CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (Api.CHAT, {"include_reasoning": False}, "hidden-reasoning"),
        (Api.CHAT, {"include_reasoning": True}, None),
        (Api.CHAT, {"response_format": {"type": "json_object"}}, "structured-output"),
        (Api.CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, "media"),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, "prompt-list"),
        (Api.COMPLETIONS, {"frequency_penalty": "0.1"}, "penalties"),
        (Api.COMPLETIONS, {"echo": True}, "echo"),
        (Api.RESPONSES, {}, "not-for-this-api"),
    ],
)
def test_only_what_would_be_another_answer_is_refused(api: Api, fields: dict[str, Any], reason: str | None) -> None:
    """The rest of a stream has to be what the dead engine would have said."""
    assert why_not(api, body(**fields)) == reason


PIECES = st.lists(
    st.tuples(st.text(max_size=6), st.lists(st.integers(0, 200_000), min_size=1, max_size=3)), min_size=1, max_size=12
)


@given(pieces=PIECES, cuts=st.sets(st.integers(1, 11)), shows=st.booleans())
def test_ids_are_noted_and_hidden_whatever_the_text(
    pieces: list[tuple[str, list[int]]], cuts: set[int], shows: bool
) -> None:
    """Also if the text looks like a field; tokens without text yet are generated again."""
    asked = {"return_token_ids": True} if shows else {}
    recovery = Recovery(Api.COMPLETIONS, body(prompt="x", max_tokens=500, **asked), can_continue=True)
    events = [event('"token_ids":[7] ' + t if t else "", ids) for t, ids in pieces]
    events[0] = event(pieces[0][0], pieces[0][1], prompt_token_ids=[1, 2, 3])
    edges = [0, *sorted(c for c in cuts if c < len(events)), len(events)]
    passed = b""
    for start, end in itertools.pairwise(edges):
        passed += recovery(b"".join(e + b"\n\n" for e in events[start:end]))
    read = [json.loads(e[6:])["choices"][0] for e in passed.split(b"\n\n")[:-1]]
    assert [c["text"] for c in read] == [json.loads(e[6:])["choices"][0]["text"] for e in events]
    if shows:
        assert [c["token_ids"] for c in read] == [ids for _, ids in pieces]
    else:
        assert all(c["token_ids"] is None and c.get("prompt_token_ids") is None for c in read)
    shown = len(pieces)
    while not shows and shown and not pieces[shown - 1][0]:
        shown -= 1
    resumed, ids = recovery.resume()
    sent = [i for _, some in pieces[:shown] for i in some]
    assert ids == []
    assert json.loads(bytes(resumed["prompt"])) == [1, 2, 3, *sent]
    assert json.loads(bytes(resumed["max_tokens"])) == 500 - len(sent)


def test_a_chat_leg_gets_its_prompt_beside_what_ties_it() -> None:
    """The handle stays as it is, and the messages too: the engine checks them still."""
    leg = b'{"messages":[1.50],"kv_transfer_params":{"remote_block_ids":[[1]],"x":1.0}}'
    assert with_prompt_ids(leg, [4, 5]) == (
        b'{"messages":[1.50],"kv_transfer_params":{"remote_block_ids":[[1]],"x":1.0,"prompt_token_ids":[4,5]}}'
    )
    assert json.loads(with_prompt_ids(b"{}", [4]))["kv_transfer_params"] == {"prompt_token_ids": [4]}


def test_reasoning_is_not_taken_up_in_its_middle() -> None:
    """The engine's parser would take the rest of a thought for the answer."""
    recovery = Recovery(Api.CHAT, body(messages=[]), can_continue=True)
    delta = {"delta": {"reasoning": "because"}, "index": 0, "token_ids": [1], "prompt_token_ids": [1]}
    recovery(b"data: " + json.dumps({"choices": [delta], "prompt_token_ids": [1]}).encode() + b"\n\n")
    assert recovery.obstacle == "reasoning"


def chat_event(delta: dict[str, Any], ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids, **more}
    return (
        b"data: "
        + json.dumps({"id": "a", "created": 1, "choices": [choice]}, separators=(",", ":")).encode()
        + b"\n\n"
    )


def test_events_that_only_carry_ids_are_not_the_clients_and_their_tokens_are_generated_again() -> None:
    """A parser that keeps words back makes such events; a continuation has to let it see those words."""
    recovery = Recovery(Api.CHAT, body(messages=[], max_tokens=20), can_continue=True)
    silent = chat_event({}, [4, 5])
    opening = chat_event({"role": "assistant", "content": ""}, None, prompt_token_ids=[1, 2])
    shown = [
        opening,
        chat_event({"content": "a"}, [3]),
        chat_event({}, [6], logprobs={"content": []}),
        chat_event({}, [7], finish="stop"),
    ]
    passed = recovery(shown[0] + silent + shown[1] + silent) + recovery(silent) + recovery(shown[2])
    resumed = Recovery(Api.CHAT, body(messages=[], max_tokens=20), can_continue=True)
    resumed(shown[0] + silent)
    fields, ids = resumed.resume()
    assert (ids, json.loads(bytes(fields["max_tokens"]))) == ([1, 2], 20)
    passed += recovery(shown[3])
    deltas = [json.loads(e[6:])["choices"][0] for e in passed.split(b"\n\n")[:-1]]
    assert [d["delta"] for d in deltas] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}, {}]
    assert deltas[-1]["finish_reason"] == "stop"


def test_whoever_asks_for_ids_gets_every_event() -> None:
    """Then the engine would have sent them anyway."""
    recovery = Recovery(Api.CHAT, body(messages=[], return_token_ids=True), can_continue=True)
    events = chat_event({"content": "a"}, [3]) + chat_event({}, [4, 5])
    assert recovery(events) == events
