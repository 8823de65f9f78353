"""The admin API: its key, what it shows, and what draining waits for."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from disagg.router.admin import OPERATIONS, Admin
from disagg.router.fleet import State
from disagg.router.key_file import key_digest
from tests.faults.test_route import Desk, decode_only, desk, engines
from tests.support.mock_engine import EVENTS, gated, hangs
from tests.support.rig import Call, Reply, Rig, rig

KEY = "admin-secret"


async def call(port: int, method: str, path: str, body: object = None, key: str | None = KEY) -> Reply:
    """One request to an admin API."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: t", f"content-length: {len(data)}"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    connection = await Call.open(port)
    connection.send("\r\n".join([*lines, "", ""]).encode() + data)
    try:
        return await connection.reply()
    finally:
        await connection.close()


@asynccontextmanager
async def admin_of(r: Rig) -> AsyncIterator[int]:
    """The admin API of a deployment that started its instances itself."""
    admin = Admin(r.router, key_digest(KEY.encode()), lambda: asyncio.get_running_loop().time() + r.skew[0])
    await admin.start("127.0.0.1", 0)
    try:
        yield admin.port
    finally:
        await admin.stop()


async def instance(port: int, name: str) -> dict[str, Any]:
    found = (await call(port, "GET", "/admin/instances")).json()["instances"]
    return next(i for i in found if i["name"] == name)


async def test_every_operation_needs_the_admin_key_and_client_keys_do_not_do() -> None:
    """401 before anything is looked at, for every path of the table and for unknown ones."""
    async with rig(api_key=("client",)) as r, admin_of(r) as port:
        for op in OPERATIONS:
            for key in (None, "", "wrong", "client"):
                reply = await call(port, op.method, op.path.replace("{name}", "decode-0"), key=key)
                assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert (await call(port, "GET", "/nowhere", key=None)).status == 401
        assert (await call(port, "GET", "/nowhere")).status == 404
        assert (await call(port, "PATCH", "/admin/policy")).status == 405
        assert (await call(r.router.port, "GET", "/admin/instances", key="client")).status == 404


async def test_a_drained_prefill_waits_until_decode_has_collected_its_kv() -> None:
    """No new requests at once; `drained` only when its own legs are over and each handle was used."""
    async with rig(prefill=2) as r, admin_of(r) as port:
        gate = asyncio.Event()
        r.d.script.append(gated(gate, [], EVENTS))
        stream = await r.call({"model": "m", "prompt": "x", "stream": True})
        await r.d.arrived.wait()
        name = next(m.name for m in r.fleet.members() if m.pinned)
        shown = (await call(port, "POST", f"/admin/instances/{name}/drain")).json()
        assert (shown["state"], shown["draining"], shown["drained"]) == ("draining", True, False)
        assert (shown["in_flight"], shown["pinned_prompts"]) == (0, 1)
        for _ in range(4):
            assert (await r.ask()).headers["x-disagg-prefill"] != name
        gate.set()
        assert (await stream.reply()).status == 200
        await stream.close()
        await r.settled()
        assert (await instance(port, name))["drained"] is True
        await call(port, "POST", f"/admin/instances/{name}/undrain")
        assert (await instance(port, name))["state"] == "ready"


async def test_kv_that_nobody_fetched_holds_a_drain_until_its_lease_ends() -> None:
    """The client left before decode had said anything: decode may still read, until the lease is over."""
    async with rig(lease_s=20.0) as r, admin_of(r) as port:
        r.d.script.append(hangs)
        left = await r.call({"model": "m", "prompt": "x", "stream": True})
        await r.d.arrived.wait()
        await call(port, "POST", "/admin/instances/prefill-0/drain")
        await left.close()
        member = r.fleet.get("prefill-0")
        assert member is not None
        r.d.reset_connections()
        for _ in range(500):
            if not member.pinned:
                break
            await asyncio.sleep(0.01)
        shown = await instance(port, "prefill-0")
        assert (shown["pinned_prompts"], shown["drained"]) == (0, False)
        assert 0 < shown["leased_for_s"] <= 20
        r.skew[0] += 21
        assert (await instance(port, "prefill-0"))["drained"] is True


async def test_an_operators_drain_outlives_a_restart_of_the_engine() -> None:
    """News about the process do not put it back into service."""
    async with rig(decode=2) as r, admin_of(r) as port:
        await call(port, "POST", "/admin/instances/decode-0/drain")
        r.fleet.update("decode-0", "next")
        r.fleet.mark("decode-0", "next", State.READY)
        assert (await instance(port, "decode-0"))["state"] == "draining"
        for _ in range(4):
            assert (await r.ask()).headers["x-disagg-decode"] == "decode-1"


async def test_policy_and_log_level_are_set_and_mistakes_are_told() -> None:
    """What is unknown is a 400 that names what is known, and changes nothing."""
    async with rig(api_key=("hush",)) as r, admin_of(r) as port:
        reply = await call(port, "PUT", "/admin/policy", {"stage": "decode", "name": "round-robin"})
        assert reply.status == 200
        assert r.router.config.spec.decode_policy == "round-robin"
        for body in (
            {"stage": "decode", "name": "best"},
            {"stage": "x", "name": "random"},
            {"stage": "decode"},
            b"{",
        ):
            assert (await call(port, "PUT", "/admin/policy", body)).status == 400
        assert (await call(port, "PUT", "/admin/log-level", {"level": "loud"})).status == 400
        level = logging.getLogger("disagg").level
        try:
            assert (await call(port, "PUT", "/admin/log-level", {"level": "error"})).status == 200
            assert logging.getLogger("disagg").level == logging.ERROR
        finally:
            logging.getLogger("disagg").setLevel(level)
        shown = await call(port, "GET", "/admin/config")
        assert shown.json()["router"]["decode_policy"] == "round-robin"
        assert b"hush" not in shown.body


async def test_a_launchers_instances_are_neither_added_nor_removed() -> None:
    """They can be drained; their processes belong to whoever started them."""
    async with rig() as r, admin_of(r) as port:
        assert (await call(port, "DELETE", "/admin/instances/decode-0")).status == 400
        assert (await call(port, "POST", "/admin/instances", {"stage": "decode", "url": "http://x:1"})).status == 400
        assert (await call(port, "POST", "/admin/instances/nobody/drain")).status == 404


async def test_engines_are_added_and_removed_while_the_router_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An added engine gets requests once it has answered; a removed one is drained, or forgotten at once."""
    monkeypatch.setenv("DISAGG_ADMIN_KEY", KEY)
    fast = "health_interval_s: 0.02, health_timeout_s: 0.1, admin_port: 1"
    async with engines(3) as (one, two, three):
        text = decode_only(one, router=fast)
        async with _admin_desk(text) as (d, port):
            await d.until(lambda: d.state() is State.READY)
            added = await call(port, "POST", "/admin/instances", {"stage": "decode", "url": two.url, "name": "extra"})
            assert (added.status, added.json()["name"]) == (201, "extra")
            await d.until(lambda: d.state("extra") is State.READY)
            for body in (
                {"stage": "decode", "url": two.url},
                {"stage": "decode", "url": three.url, "name": "extra"},
                {"stage": "prefill", "url": three.url},
                {"stage": "decode", "url": "ftp://x"},
                {"stage": "decode", "url": three.url, "nmae": "x"},
                {"url": three.url},
            ):
                assert (await call(port, "POST", "/admin/instances", body)).status == 400, body
            assert (await call(port, "DELETE", "/admin/instances/decode-0")).status == 202
            await d.until(lambda: d.state() is None)
            assert (await d.ask()).headers["x-disagg-decode"] == "extra"
            assert (await call(port, "DELETE", "/admin/instances/extra?now=true")).status == 200
            assert d.state("extra") is None
            assert (await d.ask()).status == 503


@asynccontextmanager
async def _admin_desk(text: str) -> AsyncIterator[tuple[Desk, int]]:
    """`disagg route` with an admin API on a free port."""
    async with desk(text) as d:
        assert d.routing.admin is not None
        yield d, d.routing.admin.port
