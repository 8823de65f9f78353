"""What is found out about a request, and that it is nothing where no policy looks at it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from disagg.engines.base import Api
from disagg.http.client import Client
from disagg.http.messages import Request
from disagg.policy.base import choose
from disagg.policy.registry import make_policy
from disagg.router.affinity import Affinity, Hints
from disagg.router.fleet import Fleet, State
from disagg.router.intake import Intake
from disagg.router.tokens import Tokens
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

LONG = " ".join(f"word{i}" for i in range(400))


def fleet(prefill: int = 3, decode: int = 3) -> Fleet:
    made = Fleet((Stage.PREFILL, Stage.DECODE))
    for stage, count in ((Stage.PREFILL, prefill), (Stage.DECODE, decode)):
        for i in range(count):
            made.add(f"{stage}-{i}", stage, f"http://127.0.0.1:{9900 + i}", "one")
            made.mark(f"{stage}-{i}", "one", State.READY)
    return made


def affinity(prefill: str, decode: str = "round-robin", members: Fleet | None = None, **spec: Any) -> Affinity:
    members = members or fleet()
    policies = {Stage.PREFILL: make_policy(prefill), Stage.DECODE: make_policy(decode)}
    return Affinity(policies, RouterSpec(**spec), members, Tokens(members, Client(), ("m",), lambda: 0.0))


async def hints(a: Affinity, body: dict[str, object], api: Api = Api.CHAT, **headers: str) -> Hints | None:
    lines = [(b"content-type", b"application/json")]
    lines += [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    request = Request("POST", api.value, api.value, lines, json.dumps(body).encode())
    parsed = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    return await a.hints(a.with_session(request, Intake(api, parsed, stream=False, headers=())))


def pick(a: Affinity, stage: Stage, h: Hints | None, *not_these: str) -> str:
    """The name of the instance that a request is sent to."""
    policy, facts = a.question(stage, h)
    chosen = choose(policy, fleet().snapshots(stage), facts, not_these)
    assert chosen is not None
    a.sent(stage, chosen.name, h)
    return chosen.name


def chat(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


@pytest.mark.parametrize("name", ["round-robin", "random", "least-loaded", "power-of-two"])
async def test_policies_that_know_nothing_of_prompts_cost_nothing(name: str) -> None:
    """Nothing is read, hashed or remembered."""
    assert await hints(affinity(name, name), chat(LONG), x_session_id="s") is None


async def test_the_policy_of_a_stage_that_is_not_there_asks_for_nothing() -> None:
    """A deployment without prefill does not hash prompts for it."""
    members = Fleet((Stage.DECODE,))
    members.add("decode-0", Stage.DECODE, "http://127.0.0.1:9800", "one")
    assert await hints(affinity("prefix-affinity", members=members), chat(LONG)) is None


async def test_prompts_are_not_hashed_where_there_is_one_instance() -> None:
    """There is nothing to choose between; the length is still told where the threshold needs it."""
    members = fleet(prefill=1)
    alone = await hints(affinity("prefix-affinity", members=members), chat(LONG))
    assert alone is not None
    assert alone.keys == []
    with_threshold = await hints(affinity("prefix-affinity", members=members, local_prefill_tokens=100), chat(LONG))
    assert with_threshold is not None
    assert with_threshold.keys
    members.add("prefill-1", Stage.PREFILL, "http://127.0.0.1:9990", "one")
    of_two = await hints(affinity("prefix-affinity", members=members), chat(LONG))
    assert of_two is not None
    assert of_two.keys


async def test_each_turn_of_a_conversation_goes_where_the_last_one_went() -> None:
    """Although each is longer, and other prompts come in between."""
    a = affinity("prefix-affinity")
    turns = [LONG]
    first = pick(a, Stage.PREFILL, await hints(a, chat(*turns)))
    for i in range(5):
        other = await hints(a, chat(f"{i} {LONG}"))
        pick(a, Stage.PREFILL, other)
        turns += [f"answer {i}", f"question {i}"]
        assert pick(a, Stage.PREFILL, await hints(a, chat(*turns))) == first


async def test_tools_and_the_system_prompt_count_as_the_prompts_beginning() -> None:
    """They stand before the messages in what the engine sees, wherever the client writes them."""
    a = affinity("prefix-affinity")
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    plain = await hints(a, chat(LONG))
    with_tools = await hints(a, {**chat(LONG), "tools": tools})
    same_tools = await hints(a, {"tools": tools, **chat("x " + LONG)})
    assert plain is not None
    assert with_tools is not None
    assert same_tools is not None
    assert set(plain.keys).isdisjoint(with_tools.keys)
    assert with_tools.keys[:3] == same_tools.keys[:3]


async def test_a_restarted_instance_holds_nothing() -> None:
    """Its conversations go where the load is least, as if they were new."""
    members = fleet()
    a = affinity("prefix-affinity", members=members)
    h = await hints(a, chat(LONG))
    name = pick(a, Stage.PREFILL, h)
    assert a.question(Stage.PREFILL, h)[1].matched.keys() == {name}
    members.update(name, "two")
    assert a.question(Stage.PREFILL, h)[1].matched == {}


async def test_stages_remember_apart() -> None:
    """What prefill was sent is not in decode's cache."""
    a = affinity("prefix-affinity", "prefix-affinity")
    h = await hints(a, chat(LONG))
    pick(a, Stage.PREFILL, h)
    assert a.question(Stage.DECODE, h)[1].matched == {}


async def test_a_session_is_named_by_a_header_or_else_by_the_user_field() -> None:
    """The header's name is a setting; a request with neither has no session."""
    a = affinity("round-robin", "session-affinity", session_header="X-Chat")
    by_header = await hints(a, {**chat("x"), "user": "u"}, x_chat="s1")
    by_user = await hints(a, {**chat("x"), "user": "u"}, x_session_id="s1")
    none = await hints(a, chat("x"))
    assert by_header is not None
    assert by_header.session == b"s1"
    assert by_user is not None
    assert by_user.session == b'"u"'
    assert none is not None
    assert none.session == b""
    picks = {pick(a, Stage.DECODE, by_header) for _ in range(6)}
    assert len(picks) == 1


async def test_short_prompts_are_told_from_long_ones() -> None:
    """By an estimate for text, by a count for token ids, less what decode was sent before."""
    a = affinity("round-robin", "prefix-affinity", local_prefill_tokens=100)
    short = await hints(a, chat("hello"))
    long = await hints(a, chat(LONG))
    ids = await hints(a, {"prompt": list(range(100_000, 100_099))}, Api.COMPLETIONS)
    more_ids = await hints(a, {"prompt": [1] * 100}, Api.COMPLETIONS)
    reasons = [a.local_reason(h, Stage.DECODE) for h in (short, long, ids, more_ids)]
    assert reasons == ["short-prompt", None, "short-prompt", None]
    pick(a, Stage.DECODE, long)
    again = await hints(a, chat(LONG, "yes", "go on"))
    assert a.local_reason(again, Stage.DECODE) == "short-prompt"


async def test_estimates_follow_what_engines_count() -> None:
    """A tokenizer that makes one token of eight bytes is believed after a while."""
    a = affinity("round-robin", local_prefill_tokens=100)
    h = await hints(a, chat(LONG))
    assert h is not None
    assert h.length == pytest.approx(h.text_bytes / 4)
    for _ in range(200):
        a.learn(h, h.text_bytes // 8)
    learnt = await hints(a, chat(LONG))
    assert learnt is not None
    assert learnt.length == pytest.approx(h.text_bytes / 8, rel=0.02)
    a.learn(None, 10)
