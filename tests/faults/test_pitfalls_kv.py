"""KV over its whole life: what other systems leaked, mixed up or waited for, tried on engines that count blocks.

`cluster` checks at the end of each test that all blocks, leases, legs and connections have come home, that each
client saw one ending, and that every answer has the words and the bill of one engine that did everything itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from disagg.engines.emulated.settings import SimplePace
from disagg.router.fleet import State
from tests.support.client import CHAT, Ask, Ending
from tests.support.cluster import SETTINGS, body_of, cluster, fresh_prompt, streamed
from tests.support.launch_fakes import until

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def prompt_of(tokens: int) -> str:
    """A prompt of exactly so many tokens: each letter group after a space is one."""
    return "aaa" + " aaa" * (tokens - 1)


@both_ways
@pytest.mark.parametrize("over", [-1, 0, 1, 2])
async def test_a_prompt_at_the_context_limit_is_served_or_refused_as_by_one_engine(over: int, stream: bool) -> None:
    """Refused by prefill with both numbers, and decode never starts from a KV of one token."""
    settings = replace(SETTINGS, max_model_len=256)
    async with cluster(settings=settings) as c:
        tokens = 255 + over
        result = await c.ask(prompt=prompt_of(tokens), max_tokens=1, stream=stream)
        right = await c.right_words(result.ask)
        assert (result.status, result.ending) == (right.status, right.ending)
        assert result.status == (400 if over > 0 else 200)
        if over > 1:
            assert (b"256" in result.body, b"257" in result.body) == (True, True)
        if over > 0:
            assert c.d.instance.core.engine.counters.prompt_tokens == 0
        assert (await c.ask()).ending is Ending.ANSWERED


@both_ways
async def test_a_prompt_that_only_prefill_could_take_is_refused_and_its_kv_freed(stream: bool) -> None:
    """Stages with unequal limits: the client is told by the smaller one."""
    async with cluster() as c:
        await c.d.crash()
        c.d.instance.settings = replace(c.d.instance.settings, max_model_len=128)
        await c.d.start()
        result = await c.ask(prompt=prompt_of(300), max_tokens=4, stream=stream)
        assert (result.status, result.ending) == (400, Ending.REFUSED)


@both_ways
async def test_a_client_that_leaves_during_the_transfer_costs_no_blocks(stream: bool) -> None:
    """On neither side, although the read goes on after the request is gone."""
    async with cluster() as c:
        c.d.fault(transfer_s=0.2)
        gone = [c.ask(Ask(body_of(stream=stream), leave_after_s=0.1)) for _ in range(5)]
        assert {r.ending for r in await asyncio.gather(*gone)} == {Ending.LEFT}
        c.d.fault()
        assert (await c.ask()).ending is Ending.ANSWERED


async def test_blocks_of_an_aborted_transfer_do_not_change_the_next_requests_words() -> None:
    """A pool for two requests: the second one is admitted while the aborted one's KV is still arriving."""
    settings = replace(SETTINGS, num_blocks=32, max_model_len=256, prefix_caching=False)
    async with cluster(settings=settings) as c:
        c.d.fault(transfer_s=0.15)
        await c.ask(Ask(body_of(prompt=prompt_of(200)), leave_after_s=0.05))
        results = await asyncio.gather(*(c.ask(prompt=f"{n} " + prompt_of(150)) for n in range(3)))
        assert {r.ending for r in results} == {Ending.ANSWERED}


@both_ways
async def test_a_client_that_leaves_while_decode_has_not_scheduled_it_frees_prefill(stream: bool) -> None:
    """Accepted by decode and not begun: prefill's blocks are back within the lease, here far sooner."""
    settings = replace(SETTINGS, max_num_seqs=1, lease_s=60.0)
    async with cluster(settings=settings, pace=SimplePace(0, 0.02)) as c:
        busy = asyncio.create_task(c.ask(streamed(max_tokens=20)))
        await until(lambda: len(c.d.instance.core.engine.running) == 1)
        await c.ask(Ask(body_of(stream=stream), leave_after_s=0.1))
        await until(lambda: c.p.open_books() == [])
        assert (await busy).ending is Ending.ANSWERED


async def test_a_client_that_leaves_while_decode_stands_still_frees_prefill() -> None:
    """Nothing but the lease can: it does."""
    settings = replace(SETTINGS, lease_s=0.5)
    async with cluster(settings=settings) as c:
        c.d.freeze()
        await asyncio.gather(*(c.ask(Ask(body_of(), leave_after_s=0.1)) for _ in range(4)))
        await until(lambda: c.p.open_books() == [])
        c.d.thaw()
        await c.settled()
        assert (await c.ask()).ending is Ending.ANSWERED


async def test_a_storm_of_clients_that_give_up_leaves_room_for_the_next_at_once() -> None:
    """Two hundred aborts in every phase, and then all slots are free: no slot waits for a time-out."""
    settings = replace(SETTINGS, lease_s=60.0, num_blocks=4096)
    async with cluster(2, 2, settings=settings, pace=SimplePace(50_000, 0.002)) as c:
        delays = [0.0, 0.01, 0.03, 0.06]
        asks = [Ask(body_of(stream=n % 2 == 0, max_tokens=400), leave_after_s=delays[n % 4]) for n in range(200)]
        await asyncio.gather(*(c.ask(a) for a in asks))
        results = await asyncio.gather(*(c.ask() for _ in range(20)))
        assert {r.ending for r in results} == {Ending.ANSWERED}
        await until(lambda: all(len(n.instance.core.engine.running) == 0 for n in c.nodes.values()))


@pytest.mark.parametrize("prompts", [["a", 1], [[-1], [2]], [[1], []]], ids=["text", "first", "second"])
async def test_a_list_with_one_prompt_that_is_refused_leaves_no_kv(prompts: list[object]) -> None:
    """The refusal ends the other prompts' legs, some of them in the very turn in which prefill answers them."""
    settings = replace(SETTINGS, lease_s=60.0, num_blocks=4096)
    async with cluster(2, 2, settings=settings, pace=SimplePace(200_000, 0.005)) as c:
        body = {"model": "toy", "prompt": prompts, "max_tokens": 4}
        results = await asyncio.gather(*(c.ask(Ask(body)) for _ in range(20)))
        assert {r.ending for r in results} == {Ending.REFUSED}
        await c.settled()


async def test_a_decode_abort_after_which_prefill_dies_frees_decode() -> None:
    """Blocks held for a writer that is gone come home too."""
    async with cluster(2, 1) as c:
        c.d.fault(transfer_s=0.2)
        first = asyncio.create_task(c.ask(Ask(body_of(), leave_after_s=0.1)))
        await until(lambda: len(c.d.instance.core.engine.loading) == 1)
        await c.p.crash()
        assert (await first).ending is Ending.LEFT
        c.d.fault()
        await until(lambda: c.d.open_books() == [])
        assert (await c.ask()).ending is Ending.ANSWERED


@pytest.mark.parametrize("told", [True, False], ids=["told", "unnoticed"])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_an_engine_that_restarts_on_its_port_is_a_new_one(victim: str, told: bool) -> None:
    """Between two requests, and whether or not anybody noticed: no stale handshake, no foreign KV."""
    async with cluster(2, 2) as c:
        assert (await c.ask()).ending is Ending.ANSWERED
        for _ in range(2):
            await c.nodes[victim].crash(told=told)
            await c.nodes[victim].start(told=told)
            results = [await c.ask() for _ in range(4)]
            assert {r.ending for r in results} == {Ending.ANSWERED}
            c.nodes[victim].announce()
        assert victim in set().union(*[(await c.ask()).instances for _ in range(4)])


async def test_a_pair_that_restarts_together_serves_again() -> None:
    """Prefill, then decode, on the same ports, with one instance of each."""
    async with cluster() as c:
        assert (await c.ask()).ending is Ending.ANSWERED
        for node in (c.p, c.d):
            await node.crash()
            await node.start()
            assert (await c.ask()).headers["x-disagg-path"] == "disaggregated"


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_death_fails_only_what_depends_on_it(victim: str) -> None:
    """Requests in each phase when an engine dies: each ends once, and the survivors need no restart."""
    settings = replace(SETTINGS, max_num_seqs=4)
    async with cluster(2, 2, settings=settings, pace=SimplePace(4_000, 0.005), retries=4, retry_budget=1.0) as c:
        tasks = [asyncio.create_task(c.ask(streamed(max_tokens=30))) for _ in range(20)]
        await until(lambda: sum(len(n.instance.core.engine.running) for n in c.nodes.values()) >= 6)
        await c.nodes[victim].crash()
        results = await asyncio.gather(*tasks)
        for result in results:
            assert result.ending is Ending.ANSWERED or victim in result.instances, result
        assert (await c.ask()).ending is Ending.ANSWERED
        await c.nodes[victim].start()
        await c.settled()


@both_ways
async def test_prefill_that_dies_before_decode_has_read_is_told_once(stream: bool) -> None:
    """Nothing was sent yet: an error status, never a 200 with an empty message."""
    async with cluster(retries=0) as c:
        c.d.fault(transfer_s=0.2)
        task = asyncio.create_task(c.ask(stream=stream))
        await until(lambda: len(c.d.instance.core.engine.loading) == 1)
        await c.p.crash()
        result = await task
        assert result.ending is Ending.FAILED
        assert result.status >= 500
        assert b"choices" not in result.body


async def test_a_lease_is_renewed_while_decode_has_the_request_queued() -> None:
    """A queue on decode that is three leases long: every prompt's KV is still there when its turn comes."""
    settings = replace(SETTINGS, max_num_seqs=1, lease_s=0.6)
    async with cluster(settings=settings, pace=SimplePace(0, 0.02)) as c:
        results = await asyncio.gather(*(c.ask(streamed(max_tokens=15)) for _ in range(6)))
        assert {r.ending for r in results} == {Ending.ANSWERED}
        assert c.p.instance.core.engine.leases.expired == 0
        assert c.p.instance.core.engine.leases.late == 0


async def test_abandoned_leases_end_although_an_older_one_is_renewed() -> None:
    """A prompt that waits long for a busy decode does not keep those alive that a frozen one will never fetch."""
    settings = replace(SETTINGS, max_num_seqs=1, lease_s=0.6)
    async with cluster(1, 2, settings=settings, pace=SimplePace(0, 0.02)) as c:
        frozen = c.nodes["decode-1"]
        c.fleet.mark("decode-1", frozen.incarnation, State.DRAINING)
        waiting = [asyncio.create_task(c.ask(streamed(max_tokens=60))) for _ in range(3)]
        await until(lambda: c.d.instance.core.engine.queued == 2)
        c.fleet.mark("decode-0", c.d.incarnation, State.DRAINING)
        c.fleet.mark("decode-1", frozen.incarnation, State.READY)
        frozen.freeze()
        await asyncio.gather(*(c.ask(Ask(body_of(), leave_after_s=0.3)) for _ in range(10)))
        await until(lambda: len(c.p.instance.core.engine.leases) <= 2)
        frozen.thaw()
        assert {(await w).ending for w in waiting} == {Ending.ANSWERED}


async def test_decode_that_stood_still_beyond_the_lease_is_given_up_before_it_reads_foreign_blocks() -> None:
    """The limit for the first token is shorter than the lease: a 504, and not another prompt's words."""
    settings = replace(SETTINGS, lease_s=0.8)
    async with cluster(settings=settings, first_token_timeout_s=0.3, retries=0) as c:
        c.d.freeze()
        result = await c.ask(streamed())
        assert result.status == 504
        await until(lambda: len(c.p.instance.core.engine.leases) == 0)
        c.d.thaw()
        results = await asyncio.gather(*(c.ask() for _ in range(4)))
        assert {r.ending for r in results} == {Ending.ANSWERED}


async def test_prompts_larger_than_the_space_left_on_decode_do_not_wait_for_each_other() -> None:
    """Receive space for one and a half prompts, six prompts at once."""
    settings = replace(SETTINGS, num_blocks=24, max_model_len=256)
    async with cluster(settings=settings) as c:
        results = await asyncio.gather(*(c.ask(prompt=f"{n} " + prompt_of(230), max_tokens=4) for n in range(6)))
        assert {r.ending for r in results} == {Ending.ANSWERED}


@both_ways
@pytest.mark.parametrize("tokens", [1, 2, 3])
async def test_the_first_token_is_neither_lost_nor_doubled(tokens: int, stream: bool) -> None:
    """So many tokens as were asked for, each once, as prefill's own sample and decode's could tempt to two."""
    async with cluster() as c:
        for _ in range(10):
            body = body_of(max_tokens=tokens, stream=stream)
            result = await c.ask(Ask(body | ({"stream_options": {"include_usage": True}} if stream else {})))
            assert result.usage is not None
            assert result.usage["completion_tokens"] == tokens
            if stream:
                assert result.body.count(b'"text":" ') == tokens


@both_ways
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_first_token_that_ends_the_text_is_the_whole_answer(ignore_eos: bool, stream: bool) -> None:
    """End-of-sequence comes first: prefill still hands over or answers, and `ignore_eos` goes on."""
    settings = replace(SETTINGS, mean_output_tokens=1)
    async with cluster(settings=settings) as c:
        result = await c.ask(ignore_eos=ignore_eos, max_tokens=4, stream=stream)
        assert result.finish == {0: "length" if ignore_eos else "stop"}


@both_ways
@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 6, "max_tokens": 8, "ignore_eos": False},
        {"stop": ["a", "e"], "max_tokens": 30},
        {"stop": [" "], "max_tokens": 30},
        {"temperature": 0.8, "seed": 11, "n": 3},
        {"temperature": 1.1, "seed": 5, "top_p": 0.9},
        {"echo": True, "max_tokens": 3},
    ],
    ids="-".join,
)
async def test_parameters_that_clash_with_a_prefill_of_one_token_keep_their_meaning(
    fields: dict[str, Any], stream: bool
) -> None:
    """Minimum lengths, stops, several choices: the words of one engine, and no 400 from the leg of one token."""
    async with cluster() as c:
        for _ in range(3):
            assert (await c.ask(**fields, stream=stream)).ending is Ending.ANSWERED


async def test_cached_tokens_are_prefills_hits_and_never_what_was_transferred() -> None:
    """Cold: none. Warm: what one engine would report for the same prompt."""
    async with cluster() as c:
        prompt = fresh_prompt(80)
        for expected in ("cold", "warm"):
            result = await c.ask(prompt=prompt)
            right = await c.right_words(result.ask)
            assert result.usage is not None
            assert right.usage is not None
            cached = [
                (u["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for u in (result.usage, right.usage)
            ]
            assert cached[0] == cached[1], expected
            assert (cached[0] > 0) == (expected == "warm")


async def test_the_bill_follows_the_path_that_was_taken() -> None:
    """Served on decode alone, usage is the same; a failed request has none."""
    async with cluster(retries=0) as c:
        await c.p.crash()
        local = await c.ask()
        assert local.headers["x-disagg-path"].startswith("local")
        assert local.usage is not None
        await c.p.start()
        c.p.fault(status=500, requests=1)
        failed = await c.ask()
        assert failed.ending is Ending.FAILED
        assert b"usage" not in failed.body


@pytest.mark.parametrize("public_id", ["a", "x" * 128, "id with blanks", "ключ", "a/b?c#d", "0_cmpl-" + "9" * 500])
async def test_public_ids_of_any_form_do_not_reach_the_keys_of_a_transfer(public_id: str) -> None:
    """Ids that engines extend with suffixes of their own pair nothing: text and id are right all the same."""
    async with cluster() as c:
        header = public_id.encode().decode("latin-1")
        result = await c.ask(Ask(body_of(), headers={"x-request-id": header}))
        assert result.headers["x-disagg-path"] == "disaggregated"
        twins = await asyncio.gather(*(c.ask(Ask(body_of(), headers={"x-request-id": header})) for _ in range(4)))
        assert {r.ending for r in twins} == {Ending.ANSWERED}


async def test_chat_and_completion_see_the_same_prompt_on_both_legs() -> None:
    """Templates are applied once: both engines count the tokens that one engine counts."""
    async with cluster() as c:
        messages = [{"role": "user", "content": fresh_prompt()}]
        body = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        result = await c.ask(Ask(body, CHAT))
        assert result.usage is not None
        counted = [n.instance.core.engine.counters.prompt_tokens for n in (c.p, c.d)]
        assert counted == [result.usage["prompt_tokens"]] * 2
