"""Client keys at the door: who gets in, how much, and what engines and logs hear of keys."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from disagg.router.app import Router
from disagg.router.key_file import make_entry
from tests.support.mock_engine import gated
from tests.support.rig import MODEL, rig


def key_file(path: Path, *entries: tuple[str, str, list[str]]) -> str:
    """A key file with these names, keys and limits; renamed into place, as an operator's tools do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(make_entry(n, k, limits, "test").line + "\n" for n, k, limits in entries))
    os.replace(fresh, path)
    return str(path)


def reload(router: Router) -> bool:
    assert router._keys is not None
    return router._keys.reload()


async def test_without_a_key_or_with_a_wrong_one_is_401() -> None:
    """The refusal names the scheme, and no engine hears of the request."""
    async with rig(api_key=("right", "second")) as r:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "right"},
            {"authorization": "Bearer"},
        ):
            reply = await r.ask(**headers)
            assert reply.status == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["type"] == "AuthenticationError"
        assert not r.p.seen
        for key in ("right", "second"):
            assert (await r.ask(authorization=f"bearer {key}")).status == 200
        assert await r.metric("disagg_key_requests_total", key="key-2", outcome="ok") == 1
        await r.settled()


async def test_models_need_the_key_and_watching_pages_do_not() -> None:
    """Load balancers and Prometheus have no key; everything that tells about the service wants one."""
    async with rig(api_key=("right",)) as r:
        for path in ("/health", "/metrics", "/version"):
            assert (await r.get(path)).status == 200
        for path in ("/v1/models", "/nowhere", "/tokenize"):
            assert (await r.get(path)).status == 401


async def test_the_clients_key_stays_here_and_engines_get_their_own(tmp_path: Path) -> None:
    """Behind the router's keys the engines see the engine key on both legs, never the client's."""
    engine_key = tmp_path / "engine"
    engine_key.write_text("for-engines\n")
    async with rig(api_key=("right",), engine_api_key_file=str(engine_key)) as r:
        assert (await r.ask(authorization="Bearer right")).status == 200
        for engine in (r.p, r.d):
            assert engine.seen[-1].header(b"authorization") == b"Bearer for-engines"
    async with rig(api_key=("right",)) as r:
        assert (await r.ask(authorization="Bearer right")).status == 200
        assert r.p.seen[-1].header(b"authorization") is None


async def test_without_keys_of_our_own_credentials_pass_through(tmp_path: Path) -> None:
    """Then they are between client and engine; the engine key opens nothing for a client that has none."""
    engine_key = tmp_path / "engine"
    engine_key.write_text("for-engines\n")
    async with rig(engine_api_key_file=str(engine_key)) as r:
        assert (await r.ask(authorization="Bearer theirs")).status == 200
        assert r.d.seen[-1].header(b"authorization") == b"Bearer theirs"
        assert (await r.ask()).status == 200
        assert r.d.seen[-1].header(b"authorization") is None


async def test_a_key_may_begin_so_many_requests_per_minute(tmp_path: Path) -> None:
    """The next one is 429 with the time to wait; other keys do not notice."""
    path = key_file(tmp_path / "k", ("slow", "s", ["requests_per_minute=2"]), ("fast", "f", []))
    async with rig(api_key_file=path) as r:
        assert [(await r.ask(authorization="Bearer s")).status for _ in range(2)] == [200, 200]
        refused = await r.ask(authorization="Bearer s")
        assert refused.status == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await r.ask(authorization="Bearer f")).status == 200
        r.skew[0] += 31
        assert (await r.ask(authorization="Bearer s")).status == 200


async def test_a_key_may_have_so_many_requests_open(tmp_path: Path) -> None:
    """The count goes down at a request's end, whatever end that is."""
    path = key_file(tmp_path / "k", ("one", "o", ["max_concurrent=1"]))
    async with rig(api_key_file=path) as r:
        gate = asyncio.Event()
        r.d.script.append(gated(gate, [b'data: {"n":1}\n\n'], [b"data: [DONE]\n\n"]))
        first = await r.call({"model": MODEL, "prompt": "x", "stream": True}, authorization="Bearer o")
        assert (await first.head()).status == 200
        assert (await r.ask(authorization="Bearer o")).status == 429
        await first.close()
        await r.settled()
        assert (await r.ask(authorization="Bearer o")).status == 200
        assert (await r.ask(b"{", authorization="Bearer o")).status == 400
        assert (await r.ask(authorization="Bearer o")).status == 200


async def test_a_key_may_be_kept_to_some_models(tmp_path: Path) -> None:
    """For this key the others do not exist, also where the request leaves the model to the router."""
    path = key_file(tmp_path / "k", ("some", "s", ["models=alias"]))
    async with rig(api_key_file=path) as r:
        assert (await r.ask({"model": "alias", "prompt": "x"}, authorization="Bearer s")).status == 200
        for body in ({"model": MODEL, "prompt": "x"}, {"prompt": "x"}):
            reply = await r.ask(body, authorization="Bearer s")
            assert reply.status == 404
            assert reply.json()["error"]["param"] == "model"


async def test_a_changed_key_file_is_taken_over_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that is removed stops working, a new one works, and a slip in the file locks nobody out."""
    path = key_file(tmp_path / "k", ("a", "old", []))
    async with rig(api_key_file=path) as r:
        assert not reload(r.router)
        key_file(tmp_path / "k", ("a", "new", []))
        assert reload(r.router)
        assert (await r.ask(authorization="Bearer old")).status == 401
        assert (await r.ask(authorization="Bearer new")).status == 200
        Path(path).write_text("a new\n")
        with caplog.at_level(logging.ERROR):
            assert not reload(r.router)
        assert "stay as they were" in caplog.text
        assert (await r.ask(authorization="Bearer new")).status == 200


async def test_the_log_has_the_keys_name_and_never_the_key(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Whoever reads logs may learn who asked, and nothing to ask with."""
    path = key_file(tmp_path / "k", ("alice", "very-secret", []))
    with caplog.at_level(logging.INFO, logger="disagg"):
        async with rig(api_key_file=path) as r:
            await r.ask(authorization="Bearer very-secret")
            await r.ask(authorization="Bearer guessed-secret")
    assert "alice" in caplog.text
    assert "-secret" not in caplog.text
