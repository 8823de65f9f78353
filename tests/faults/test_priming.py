"""Several choices of one prompt: a leg of its own fetches the KV, then the same decode engine answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from disagg.engines.base import Peer, ReadinessProbe
from disagg.http.messages import JSON_TYPE, Header, Request
from disagg.http.responder import Responder
from disagg.router.fleet import Member, State
from disagg.router.prefix_caches import PrefixCache, PrefixCaches
from tests.support import mock_engine as mock
from tests.support.mock_engine import Behaviour, MockEngine, PairedDialect, PrimingDialect
from tests.support.rig import MODEL, Rig, rig

BODY = {"model": MODEL, "prompt": "x", "n": 3, "max_tokens": 9, "min_tokens": 2}
PRIMED = "disaggregated;primed=n-greater-1"
PROBE = ReadinessProbe("/health", "/metrics", None, "running", "waiting", cache_info="cache")


class PairedPriming(PairedDialect):
    """Both legs at once, of an engine that keeps what it was handed in its prefix cache."""

    primes = True


def cache(text: str, status: int = 200) -> Behaviour:
    """A metrics page."""
    return mock.answers(status, text.encode(), b"text/plain")


def legs(engine: MockEngine) -> list[tuple[bool, Any]]:
    """What a decode engine was asked: whether it was handed KV, and how many choices it should make."""
    return [("kv_transfer_params" in b or "tie" in b, b.get("n")) for b in engine.bodies]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_kv_is_fetched_by_a_leg_of_one_token_and_the_same_engine_answers(stream: bool) -> None:
    """A handle can be read once: the choices find the KV in the cache. Strict routers take it for what it is."""
    async with rig(decode=2, dialect=PrimingDialect(), strict=True) as r:
        reply = await r.ask(BODY | {"stream": stream})
        assert (reply.status, reply.headers["x-disagg-path"]) == (200, PRIMED)
        assert reply.body == (b"".join(mock.EVENTS) if stream else mock.WHOLE)
        (used,) = [d for d in r.decode if d.seen]
        assert legs(used) == [(True, 1), (False, 3)]
        first, second = used.bodies
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert "min_tokens" not in first
        assert second == BODY | {"stream": stream}
        ids = [q.header(b"x-request-id") for q in used.seen]
        assert ids[0] == r.p.seen[0].header(b"x-request-id") != ids[1]
        assert len(ids[1] or b"") == 32
        again = await r.ask(BODY)
        assert again.headers["x-disagg-path"] == PRIMED
        assert len({q.header(b"x-request-id") for d in r.decode for q in d.seen}) == 4
        await r.settled()
        assert await r.metric("disagg_priming_legs_total", outcome="ok") == 2
        assert await r.metric("disagg_legs_total", stage="decode", outcome="ok") == 4
        assert await r.metric("disagg_handoffs_total") == 2
        assert await r.metric("disagg_requests_total", path="disaggregated", reason="") == 2
        assert await r.metric("disagg_handoff_duration_seconds_count") == 2
        assert r.fleet.members()[0].pinned == 0


async def test_one_choice_is_not_primed() -> None:
    """It is what nearly all requests have, and it costs them nothing."""
    async with rig(dialect=PrimingDialect(), probe=PROBE, load_interval_s=0) as r:
        reply = await r.ask(BODY | {"n": 1, "best_of": None, "use_beam_search": False})
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert legs(r.d) == [(True, 1)]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": "2"}, "n-greater-1"),
        ({"n": None, "best_of": 2}, "best-of-greater-1"),
        ({"n": 1, "use_beam_search": True}, "beam-search"),
    ],
)
async def test_whatever_makes_several_sequences_is_primed(more: dict[str, Any], why: str) -> None:
    """The header says what it was, and the fetching leg asks for none of it."""
    async with rig(dialect=PrimingDialect()) as r:
        reply = await r.ask(BODY | more)
        assert reply.headers["x-disagg-path"] == f"disaggregated;primed={why}"
        assert r.d.bodies[1] == BODY | more
        assert "use_beam_search" not in r.d.bodies[0]
        assert r.d.bodies[0].get("best_of") in {None, 1}


async def test_both_decode_legs_go_to_the_same_cache_of_an_engine_with_several() -> None:
    """Each data-parallel rank has its own, and an engine spreads what it is not told where to take."""

    class Ranked(PrimingDialect):
        def cache_headers(self, decode: Peer, key: str) -> tuple[Header, ...]:
            return ((b"x-data-parallel-rank", f"{decode.engine_id} {key}".encode()),)

    async with rig(dialect=Ranked()) as r:
        for _ in range(2):
            await r.ask(BODY)
        await r.ask(BODY | {"n": 1})
        ranks = [q.header(b"x-data-parallel-rank") for q in r.d.seen]
        assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
        assert str(ranks[0]).startswith("b'engine-d0 ")
        assert ranks[4] is None
        assert {q.header(b"x-data-parallel-rank") for q in r.p.seen} == {None}


# Where it would not help.


async def test_an_engine_without_a_prefix_cache_does_it_all() -> None:
    """Nothing would be found again. It is asked once for each start, and prefill not at all."""
    page = 'cache{block_size="16",enable_prefix_caching="False"} 1.0\n'
    async with rig(dialect=PrimingDialect(), probe=PROBE, load_interval_s=0) as r:
        asked = 0

        async def count(engine: MockEngine, request: Request, respond: Responder) -> None:
            nonlocal asked
            asked += 1
            await cache(page)(engine, request, respond)

        r.d.pages["/metrics"] = count
        for _ in range(3):
            reply = await r.ask(BODY)
            assert reply.headers["x-disagg-path"] == "local;reason=no-prefix-cache"
            assert "x-disagg-prefill" not in reply.headers
        assert (r.p.seen, asked) == ([], 1)
        assert legs(r.d) == [(False, 3)] * 3
        r.fleet.update("decode-0", "inc-next")
        r.fleet.mark("decode-0", "inc-next", State.READY)
        r.d.pages["/metrics"] = cache(page.replace("False", "True"))
        assert (await r.ask(BODY | {"prompt": list(range(17))})).headers["x-disagg-path"].startswith("local")
    async with rig(dialect=PrimingDialect(), probe=PROBE, load_interval_s=0, strict=True) as r:
        r.d.pages["/metrics"] = cache(page)
        reply = await r.ask(BODY)
        assert reply.status == 501
        assert "no-prefix-cache" in reply.json()["error"]["message"]
        assert r.d.seen == r.p.seen == []


@pytest.mark.parametrize(
    ("prompt", "path", "prefills"),
    [
        (list(range(4)), "local;reason=within-one-block", 0),
        ("abcdef", "local;reason=within-one-block", 0),
        # Longer than a block as far as can be told; prefill, which counts 7, knows better.
        (list(range(9)), "local;reason=within-one-block", 1),
        ("a text of unknown length", "local;reason=within-one-block", 1),
    ],
)
async def test_a_prompt_within_one_block_is_not_found_again(prompt: object, path: str, prefills: int) -> None:
    """Caches keep whole blocks, and the last token is always computed."""
    async with rig(dialect=PrimingDialect(), probe=PROBE, load_interval_s=0) as r:
        r.d.pages["/metrics"] = cache('cache{block_size="8",enable_prefix_caching="True"} 1.0\n')
        reply = await r.ask(BODY | {"prompt": prompt})
        assert (reply.status, reply.headers["x-disagg-path"]) == (200, path)
        assert len(r.p.seen) == prefills
        assert legs(r.d)[-1] == (False, 3)
        await r.settled()
        assert r.fleet.members()[0].pinned == 0


@pytest.mark.parametrize(
    "page",
    [
        cache("", 404),
        cache("something_else 1.0\n"),
        cache('cache{block_size="None",enable_prefix_caching="True"} 1.0\n'),
        cache('cache{block_size="6",enable_prefix_caching="True"} 1.0\n'),
        mock.breaks,
    ],
)
async def test_a_cache_that_is_not_known_is_thought_to_help(page: Behaviour) -> None:
    """An engine that does not tell costs no request; a prompt of 7 tokens has a whole block of 6."""
    async with rig(dialect=PrimingDialect(), probe=PROBE, load_interval_s=0) as r:
        r.d.pages["/metrics"] = page
        for _ in range(2):
            assert (await r.ask(BODY | {"prompt": "longer than six"})).headers["x-disagg-path"] == PRIMED


# Failures.


async def test_a_fetching_leg_that_fails_is_tried_elsewhere_with_fresh_kv() -> None:
    """A handle is sent once. What the failed engine answered with an error is released; ids are new."""
    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.script.append(mock.error(503))
        r.decode[1].script.clear()
        for _ in range(2):
            reply = await r.ask(BODY)
            assert (reply.status, reply.headers["x-disagg-path"]) == (200, PRIMED)
        await r.settled()
        assert await r.metric("disagg_priming_legs_total", outcome="failed") == 1
        assert await r.metric("disagg_priming_legs_total", outcome="ok") == 2
        assert await r.metric("disagg_retries_total", stage="decode") == 1
        assert len({q.header(b"x-request-id") for q in r.p.seen}) == 3
        assert len([t for d in r.decode for t in d.told]) == 1
        assert r.fleet.members()[0].pinned == 0


async def test_a_refusal_of_the_fetching_leg_is_the_clients_answer() -> None:
    """It would have been the answer to the client's own body."""
    async with rig(dialect=PrimingDialect()) as r:
        r.d.script.append(mock.error(422))
        reply = await r.ask(BODY)
        assert (reply.status, reply.body) == (422, mock.error_json(422))
        assert len(r.d.seen) == 1
        await r.settled()
        assert len(r.d.told) == 1


async def test_kv_is_left_to_its_lease_if_the_fetching_leg_breaks() -> None:
    """The engine may be reading it."""
    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.script.append(mock.breaks)
        reply = await r.ask(BODY)
        assert reply.status == 502
        await r.settled()
        assert not [t for d in r.decode for t in d.told]
        assert await r.metric("disagg_priming_legs_total", outcome="broken") == 2


async def test_without_a_retry_budget_the_failure_is_told() -> None:
    """The extra leg is no reason for more tries."""
    async with rig(decode=2, dialect=PrimingDialect(), retries=0) as r:
        for d in r.decode:
            d.script.append(mock.error(503))
        assert (await r.ask(BODY)).status == 503
        assert sum(len(d.seen) for d in r.decode) == 1


async def test_a_frozen_fetching_leg_ends_in_the_time_of_a_first_token() -> None:
    """It is not streamed, but it is one token: the limit of a whole answer would be minutes."""
    async with rig(dialect=PrimingDialect(), first_token_timeout_s=0.1, retries=0) as r:
        r.d.script.append(mock.hangs)
        assert (await asyncio.wait_for(r.ask(BODY), 10)).status == 504


async def test_a_stream_in_place_of_one_token_is_a_failure() -> None:
    """Nobody would read it to its end."""
    async with rig(dialect=PrimingDialect(), retries=0) as r:
        r.d.script.append(mock.streamed())
        assert (await r.ask(BODY)).status == 502
        await r.settled()


async def test_an_engine_that_is_replaced_between_the_legs_is_not_asked_for_what_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its successor has an empty cache: the request begins again, with prefill."""
    async with rig(dialect=PrimingDialect()) as r:
        looked: list[str] = []

        async def of(caches: PrefixCaches, member: Member) -> PrefixCache:
            looked.append(member.incarnation)
            if len(looked) == 2:  # the KV is there, and the client's own body has not left
                assert legs(r.d) == [(True, 1)]
                r.fleet.update("decode-0", "inc-next")
                r.fleet.mark("decode-0", "inc-next", State.READY)
            return PrefixCache(4)

        monkeypatch.setattr(PrefixCaches, "of", of)
        reply = await r.ask(BODY | {"prompt": "long enough"})
        assert (reply.status, reply.headers["x-disagg-path"]) == (200, PRIMED)
        assert looked == ["inc-decode-0"] * 2 + ["inc-next"] * 2
        assert legs(r.d) == [(True, 1), (True, 1), (False, 3)]
        assert len(r.p.seen) == 2
        await r.settled()
        assert r.fleet.members()[0].pinned == 0


async def test_a_request_that_ends_up_on_decode_alone_does_not_claim_to_be_primed() -> None:
    """It was, on its first try; prefill has gone since."""

    async def fails(engine: MockEngine, request: Request, respond: Responder) -> None:
        await r.p.stop()
        await mock.error(500)(engine, request, respond)

    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.script.extend([mock.decoded, fails])
        r.decode[1].script.clear()
        for _ in range(2):
            reply = await r.ask(BODY)
            assert reply.status == 200
        assert reply.headers["x-disagg-path"] == "local;reason=prefill-unreachable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [mock.error(500), mock.half_whole()])
async def test_an_answering_leg_that_fails_starts_again_with_prefill(failing: Behaviour, stream: bool) -> None:
    """The KV was in the cache of the engine that failed; nothing has to be released, it was read."""
    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.script.extend([mock.decoded, failing])
        reply = await r.ask(BODY | {"stream": stream})
        assert reply.status in {500, 502}
        assert [legs(d) for d in r.decode] == [[(True, 1), (False, 3)]] * 2
        assert len(r.p.seen) == 2
        reply = await r.ask(BODY | {"stream": stream})
        assert (reply.status, reply.headers["x-disagg-path"]) == (200, PRIMED)
        await r.settled()
        assert not [t for d in r.decode for t in d.told]
        assert r.fleet.members()[0].idle(asyncio.get_running_loop().time())


async def test_a_refusal_of_the_answering_leg_is_the_clients() -> None:
    """Such as an engine's own limit of choices; the KV was read, so nothing is released."""
    async with rig(dialect=PrimingDialect()) as r:
        r.d.script.extend([mock.decoded, mock.error(400)])
        reply = await r.ask(BODY)
        assert (reply.status, reply.body) == (400, mock.error_json(400))
        await r.settled()
        assert r.d.told == []
        assert r.fleet.members()[0].pinned == 0


async def test_a_stream_that_breaks_in_its_middle_ends_with_an_error_event() -> None:
    """As any other; it is not begun again behind the client's back."""
    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.script.extend([mock.decoded, mock.streamed(mock.EVENTS[:1], end="abort")])
        reply = await r.ask(BODY | {"stream": True})
        assert reply.body.startswith(mock.EVENTS[0])
        assert b'"error"' in reply.body
        assert len(r.p.seen) == 1


async def left_during(r: Rig, stuck: Callable[..., Awaitable[None]], before: int) -> None:
    """The client leaves while the decode leg after so many others waits."""
    r.d.script.extend([*[mock.decoded] * before, stuck])
    call = await r.call(BODY | {"stream": True})
    while len(r.d.seen) <= before:
        await asyncio.sleep(0.005)
    await call.close()


async def test_a_client_that_leaves_while_the_kv_is_fetched_lets_it_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take an abort badly then. Nothing is asked of the engine after it."""
    gate = asyncio.Event()
    # One token is the first output: the shorter patience with whole answers is not meant for it.
    monkeypatch.setattr("disagg.router.steps._WHOLE_LINGER_S", 0.0)

    async def lands(engine: MockEngine, request: Request, respond: Responder) -> None:
        await gate.wait()
        await mock.decoded(engine, request, respond)

    async with rig(dialect=PrimingDialect(), linger_s=20.0) as r:
        await left_during(r, lands, 0)
        await asyncio.sleep(0.05)
        assert r.d.departures == 0
        gate.set()
        await r.settled()
        assert len(r.d.seen) == 1
        assert r.fleet.members()[0].pinned == 0
        assert await r.metric("disagg_requests_total", outcome="client_left") == 1


async def test_a_client_that_leaves_after_that_ends_the_answer_at_once() -> None:
    """No KV is on its way any more, so there is nothing to wait for."""
    async with rig(dialect=PrimingDialect(), linger_s=60.0) as r:
        await left_during(r, mock.hangs, 1)
        await asyncio.wait_for(r.d.left.wait(), 5)
        await r.settled()
        assert r.fleet.members()[0].idle(asyncio.get_running_loop().time())


async def test_only_a_failed_fetch_may_be_prefills_fault() -> None:
    """What fails after it is decode's alone."""
    async with rig(dialect=PrimingDialect(), breaker_failures=2, retries=0) as r:
        for _ in range(3):
            r.d.script.extend([mock.decoded, mock.error(500)])
            assert (await r.ask(BODY)).status == 500
        assert await r.metric("disagg_handoff_failures_total") == 0
        r.d.script.append(mock.error(500))
        assert (await r.ask(BODY)).status == 500
        assert await r.metric("disagg_handoff_failures_total", reason="decode-failed") == 1
        assert await r.metric("disagg_breaker_opened_total", stage="prefill") == 0


# Where the legs leave together.


async def test_both_legs_at_once_are_primed_too() -> None:
    """The pair fetches, and then decode answers alone."""
    async with rig(decode=2, dialect=PairedPriming()) as r:
        for stream in (False, True):
            reply = await r.ask(BODY | {"stream": stream})
            assert (reply.status, reply.headers["x-disagg-path"]) == (200, PRIMED)
        for engine in r.decode:
            assert legs(engine) in [[], [(True, 1), (False, 3)]]
        await r.settled()
        assert await r.metric("disagg_priming_legs_total", outcome="ok") == 2
        assert r.fleet.members()[0].pinned == 0


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_pair_that_fails_while_it_fetches_is_tried_again(stage: str) -> None:
    """With another key; the client's own body has not left yet."""
    async with rig(2, 2, dialect=PairedPriming()) as r:
        engines = r.prefill if stage == "prefill" else r.decode
        for engine in engines:
            engine.script.append(mock.error(503))
        engines[1].script.clear()
        for _ in range(2):
            assert (await r.ask(BODY)).headers["x-disagg-path"] == PRIMED
        await r.settled()


async def test_a_failure_after_the_pair_releases_nothing() -> None:
    """Decode has read the KV: a release would name what is gone."""
    async with rig(dialect=PairedPriming(), retries=0) as r:
        r.d.script.extend([mock.decoded, mock.error(500)])
        assert (await r.ask(BODY)).status == 500
        await r.settled()
        assert r.p.told == r.d.told == []
        assert r.fleet.members()[0].pinned == 0


# Lists and merged answers.


def choices(usage: dict[str, Any]) -> Behaviour:
    """Answer with as many choices as were asked for."""

    async def behave(engine: MockEngine, request: Request, respond: Responder) -> None:
        body = json.loads(request.body)
        own = [{"index": n, "text": f"{body['prompt']}{n}"} for n in range(int(body.get("n") or 1))]
        respond.send(200, json.dumps({"id": "i", "choices": own, "usage": usage}).encode(), (JSON_TYPE,))

    return behave


async def test_a_list_of_prompts_is_primed_for_each_and_numbered_through() -> None:
    """As one engine numbers them: all choices of the first prompt, then those of the second."""
    async with rig(decode=2, dialect=PrimingDialect()) as r:
        for d in r.decode:
            d.default = choices({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
        reply = await r.ask(BODY | {"prompt": ["a", "b"]})
        assert reply.headers["x-disagg-path"] == PRIMED
        body = reply.json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, "a0"), (1, "a1"), (2, "a2"), (3, "b0"), (4, "b1"), (5, "b2"),
        ]  # fmt: skip
        assert body["usage"] == {"prompt_tokens": 14, "completion_tokens": 6, "total_tokens": 20}
        assert await r.metric("disagg_priming_legs_total", outcome="ok") == 2


async def test_cached_tokens_are_prefills_and_never_what_was_handed_over() -> None:
    """Decode finds all of it in its cache, which is not what a client pays less for."""
    async with rig(dialect=PrimingDialect()) as r:
        usage = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2}

        async def prefilled(engine: MockEngine, request: Request, respond: Responder) -> None:
            answer = json.loads(mock.prefill_answer(engine.engine_id))
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
            answer["choices"] = [{"text": "t"}]
            respond.send(200, json.dumps(answer).encode(), (JSON_TYPE,))

        r.p.default = prefilled
        r.d.default = choices({**usage, "prompt_tokens_details": {"cached_tokens": 6}})
        reply = await r.ask(BODY)
        assert reply.json()["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}
