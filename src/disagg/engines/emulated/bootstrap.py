"""The bootstrap server of a prefill engine (Mooncake, SGLang), and how a decode engine asks it."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.engines.emulated.side_channel import TransferError
from disagg.errors import UpstreamError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Request, json_answer
from disagg.http.origin import Origin, Outgoing
from disagg.http.responder import Responder

_NOTHING: dict[str, Any] = {"detail": "Not Found"}


class Bootstrap:
    """Tells decode engines where this engine's workers are.

    Args:
        engine_id: This engine.
        address: Its side channel, as ``host:port``.
    """

    def __init__(self, engine_id: str, address: str) -> None:
        self._ranks: dict[str, Any] = {"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": address}}}}
        self._engine_id = engine_id
        self._address = address

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        match request.method, request.path:
            case "GET", "/query":
                responder.send_answer(json_answer(200, self._ranks))
            case "GET", "/route":
                host, _, port = self._address.rpartition(":")
                told = {"rank_ip": host, "rank_port": int(port), "engine_id": self._engine_id}
                responder.send_answer(json_answer(200, told))
            case "GET", "/health":
                responder.send(200, b"OK")
            case "POST", "/register":
                self._register(request, responder)
            case _:
                responder.send_answer(json_answer(404, _NOTHING))

    def _register(self, request: Request, responder: Responder) -> None:
        """A worker announces itself."""
        try:
            worker = msgspec.json.decode(request.body, type=_Worker)
        except msgspec.DecodeError as error:
            responder.send_answer(json_answer(400, {"detail": str(error)}))
            return
        rank = self._ranks.setdefault(str(worker.dp_rank), {"engine_id": worker.engine_id, "worker_addr": {}})
        if rank["engine_id"] != worker.engine_id:
            responder.send_answer(json_answer(400, {"detail": f"rank {worker.dp_rank} is another engine"}))
            return
        rank["worker_addr"].setdefault(str(worker.tp_rank), {})[str(worker.pp_rank)] = worker.addr
        responder.send(200, b'{"status":"ok"}', (JSON_TYPE,))


class _Worker(msgspec.Struct):
    engine_id: str
    addr: str
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0


class _Rank(msgspec.Struct):
    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class _Route(msgspec.Struct):
    rank_ip: str
    rank_port: int
    engine_id: str


class Directory:
    """What a decode engine knows of prefill engines' bootstrap servers; an engine's address is kept.

    Args:
        timeout_s: Limit of one question.
    """

    def __init__(self, timeout_s: float) -> None:
        self._times = LegTimes(timeout_s, timeout_s, timeout_s)
        self._client = Client()
        self._workers: dict[str, tuple[str, int]] = {}

    async def worker(self, server: str, engine_id: str) -> tuple[str, int]:
        """Address of an engine's side channel.

        Raises:
            TransferError: If the server does not answer, or does not know the engine.
        """
        if engine_id not in self._workers:
            try:
                ranks = msgspec.json.decode(await self._get(server, "/query"), type=dict[str, _Rank])
            except msgspec.DecodeError as error:
                raise TransferError(f"the bootstrap server {server} answers nonsense: {error}") from error
            for rank in ranks.values():
                if rank.engine_id == engine_id:
                    host, _, port = rank.worker_addr["0"]["0"].rpartition(":")
                    self._workers[engine_id] = (host, int(port))
        if engine_id not in self._workers:
            raise TransferError(f"the bootstrap server {server} does not know engine {engine_id}")
        return self._workers[engine_id]

    async def route(self, server: str) -> tuple[str, str, int]:
        """Id and address of the engine behind a server, as it is now.

        Raises:
            TransferError: If the server does not answer.
        """
        try:
            found = msgspec.json.decode(
                await self._get(server, "/route?engine_rank=0&target_dp_group=0"), type=_Route
            )
        except msgspec.DecodeError as error:
            raise TransferError(f"the bootstrap server {server} answers nonsense: {error}") from error
        return found.engine_id, found.rank_ip, found.rank_port

    async def _get(self, server: str, target: str) -> bytes:
        try:
            response = await self._client.request(Origin.parse(server), Outgoing("GET", target), self._times)
            try:
                return await response.read()
            finally:
                response.close()
        except (UpstreamError, ValueError) as error:
            raise TransferError(f"the bootstrap server {server} cannot be asked: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
