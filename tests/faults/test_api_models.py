"""Model names, adapters and context limits: asked of the engines once, and the same for every stage."""

from __future__ import annotations

import pytest

from disagg.router.fleet import State
from tests.support.rig import MODEL, Rig, rig


async def ids(r: Rig) -> list[str]:
    return [card["id"] for card in (await r.get("/v1/models")).json()["data"]]


async def test_engines_are_asked_once_for_each_start() -> None:
    """However often the list is read, and again after a restart."""
    async with rig(decode=2) as r:
        for _ in range(3):
            await r.get("/v1/models")
        assert [e.listings for e in (r.p, *r.decode)] == [1, 1, 1]
        r.fleet.update("decode-1", "inc-2", r.decode[1].url)
        r.fleet.mark("decode-1", "inc-2", State.READY)
        await r.get("/v1/models")
        assert [e.listings for e in (r.p, *r.decode)] == [1, 1, 2]


async def test_an_adapter_of_all_stages_is_served() -> None:
    """Listed with its parent, and requests for it reach both legs."""
    async with rig(decode=2) as r:
        for engine in (r.p, *r.decode):
            engine.adapters = ["tuned"]
        assert (await r.ask({"model": "tuned", "prompt": "x"})).status == 200
        assert [e.bodies[0]["model"] for e in (r.p, r.decode[0]) if e.bodies] in (["tuned"], ["tuned", "tuned"])
        assert await ids(r) == [MODEL, "alias", "tuned"]
        assert (await r.get("/v1/models/tuned")).json()["parent"] == "x"


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_an_adapter_of_one_stage_is_not_served(where: str) -> None:
    """Prefill without it would hand over the KV of another model: 404, and no engine is asked to compute."""
    async with rig(decode=2) as r:
        for engine in [r.p] if where == "prefill" else r.decode[:1]:
            engine.adapters = ["tuned"]
        assert await ids(r) == [MODEL, "alias"]
        assert (await r.ask({"model": "tuned", "prompt": "x"})).status == 404
        assert (await r.get("/v1/models/tuned")).status == 404
        assert not r.p.seen


async def test_an_adapter_that_was_loaded_later_is_found() -> None:
    """An unknown name makes the router ask again, but not for every request with one."""
    async with rig() as r:
        assert (await r.ask({"model": "tuned", "prompt": "x"})).status == 404
        r.p.adapters = r.d.adapters = ["tuned"]
        assert (await r.ask({"model": "tuned", "prompt": "x"})).status == 404, "asked a moment ago"
        assert r.d.listings == 1
        r.skew[0] += 3
        assert (await r.ask({"model": "tuned", "prompt": "x"})).status == 200
        assert r.d.listings == 2


async def test_one_model_is_shown_by_its_name() -> None:
    """Names with a slash included; anything else is 404."""
    async with rig() as r:
        assert (await r.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await r.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 2048
        assert (await r.get("/v1/models/other%2Fmodel")).status == 404


async def test_a_list_that_is_known_needs_no_engine() -> None:
    """Engines may be busy, or gone."""
    async with rig() as r:
        r.p.adapters = r.d.adapters = ["tuned"]
        known = await ids(r)
        await r.p.stop()
        await r.d.stop()
        assert await ids(r) == known
        assert (await r.get("/v1/models/tuned")).status == 200


@pytest.mark.parametrize(("length", "status"), [(1023, 200), (1024, 200), (1025, 400), (2000, 400)])
async def test_a_prompt_has_to_fit_on_every_stage(length: int, status: int) -> None:
    """The smaller limit counts, before prefill has computed what decode would refuse."""
    async with rig() as r:
        r.p.max_model_len, r.d.max_model_len = 4096, 1024
        await r.get("/v1/models")
        reply = await r.ask({"model": MODEL, "prompt": [7] * length})
        assert reply.status == status
        assert len(r.p.seen) == (status == 200)
        if status == 400:
            error = reply.json()["error"]
            assert error["param"] == "input_tokens"
            assert "1024 tokens" in error["message"]
            assert str(length) in error["message"]


async def test_a_prompt_that_the_engine_cuts_is_not_refused() -> None:
    """Nor one whose length only the engine can tell."""
    async with rig() as r:
        r.d.max_model_len = 16
        await r.get("/v1/models")
        assert (await r.ask({"model": MODEL, "prompt": [1] * 99, "truncate_prompt_tokens": 8})).status == 200
        assert (await r.ask({"model": MODEL, "prompt": "1, " * 99})).status == 200
        body = {"model": MODEL, "token_ids": [1] * 17, "sampling_params": {}}
        assert (await r.ask(body, "/inference/v1/generate")).status == 400
