"""A router between mock engines, and a client that sees exactly what arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from disagg.engines.base import Dialect, Peer, ReadinessProbe
from disagg.router.app import Router
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.spans import Tracer
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage
from tests.support.mock_engine import FakeDialect, MockEngine, decoded, prefilled
from tests.support.wire import metric

MODEL = "m"


@dataclass
class Reply:
    """One answer, its chunks as they were framed."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Rig:
    """Router, fleet and engines.

    Attributes:
        now: Added to the router's monotonic clock, to age handles.
    """

    fleet: Fleet
    prefill: list[MockEngine]
    decode: list[MockEngine]
    router: Router
    skew: list[float] = field(default_factory=lambda: [0.0])

    @property
    def p(self) -> MockEngine:
        return self.prefill[0]

    @property
    def d(self) -> MockEngine:
        return self.decode[0]

    async def ask(self, body: object = None, path: str = "/v1/completions", **headers: str) -> Reply:
        """Send one request on a connection of its own and wait for its end."""
        call = await self.call(body, path, **headers)
        try:
            return await call.reply()
        finally:
            await call.close()

    async def call(self, body: object = None, path: str = "/v1/completions", **headers: str) -> Call:
        """Send one request and leave the answer to be read."""
        body = {"model": MODEL, "prompt": "x"} if body is None else body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        call = await Call.open(self.router.port)
        lines = {"host": "test", "content-type": "application/json", "content-length": str(len(data))}
        lines |= {k.replace("_", "-"): v for k, v in headers.items()}
        call.send(_head("POST", path, lines) + data)
        return call

    async def get(self, path: str) -> Reply:
        """GET a page."""
        call = await Call.open(self.router.port)
        call.send(_head("GET", path, {"host": "test"}))
        try:
            return await call.reply()
        finally:
            await call.close()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        return metric((await self.get("/metrics")).body.decode(), name, **labels)

    async def settled(self) -> None:
        """Wait until every book is closed; fail if one stays open."""
        for _ in range(200):
            legs = sum(m.in_flight for m in self.fleet.members())
            engines = sum(e.open_requests for e in [*self.prefill, *self.decode])
            if not (legs or engines or self.router.in_flight or self.router.client.busy_connections):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(
            f"still open: {legs} legs, {engines} engine requests, {self.router.in_flight} client requests,"
            f" {self.router.client.busy_connections} upstream connections"
        )


class Call:
    """One client connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Call:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> Reply:
        """Read a status line and headers."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:-2])}
        return Reply(int(lines[0].split(" ")[1]), headers, b"")

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at its end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def reply(self) -> Reply:
        """Read a whole answer."""
        reply = await self.head()
        parts: list[bytes] = []
        try:
            if reply.headers.get("transfer-encoding") == "chunked":
                while data := await self.chunk():
                    parts.append(data)
            else:
                parts.append(await self.reader.readexactly(int(reply.headers.get("content-length", "0"))))
        except asyncio.IncompleteReadError as rest:
            parts.append(rest.partial)
            reply.complete = False
        reply.body = b"".join(parts)
        return reply

    async def close(self) -> None:
        """Leave."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


def _head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


@asynccontextmanager
async def rig(
    prefill: int = 1,
    decode: int = 1,
    *,
    colocated: bool = False,
    lease_s: float = 30.0,
    linger_s: float = 0.05,
    dialect: Dialect | None = None,
    probe: ReadinessProbe | None = None,
    tracer: Tracer | None = None,
    access_stream: BinaryIO | None = None,
    **spec: Any,
) -> AsyncIterator[Rig]:
    """A router with so many ready mock engines per stage; everything is closed and checked at the end."""
    serving = Stage.COLOCATED if colocated else Stage.DECODE
    fleet = Fleet(((Stage.PREFILL,) if prefill else ()) + (serving,))
    skew = [0.0]
    clocks = Clocks(monotonic=lambda: asyncio.get_running_loop().time() + skew[0])
    config = RouterConfig(
        (MODEL, "alias"),
        RouterSpec(**spec),
        lease_s=lease_s,
        linger_s=linger_s,
        probe=probe,
        tracer=tracer,
        access_stream=access_stream,
    )
    ps = [MockEngine(prefilled, f"engine-p{i}") for i in range(prefill)]
    ds = [MockEngine(decoded, f"engine-d{i}") for i in range(decode)]
    for stage, engines in ((Stage.PREFILL, ps), (serving, ds)):
        for i, engine in enumerate(engines):
            await engine.start()
            fleet.add(f"{stage}-{i}", stage, engine.url, f"inc-{stage}-{i}", Peer(engine.engine_id))
            fleet.mark(f"{stage}-{i}", f"inc-{stage}-{i}", State.READY)
    router = Router(config, dialect or FakeDialect(), fleet, clocks, tick_s=0.01)
    await router.start("127.0.0.1", 0)
    try:
        yield Rig(fleet, ps, ds, router, skew)
    finally:
        await router.stop()
        for engine in [*ps, *ds]:
            await engine.stop()
