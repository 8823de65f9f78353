"""KV between engine processes: the side channel that a prefill engine serves, and the connections of a decode engine.

One frame is four bytes of length and a msgpack array. A decode engine connects once per peer incarnation, asks who
is there, and then reads blocks by id. As with one-sided reads of a real transport, a read is not checked against
requests or leases: whatever is in the blocks is what the reader gets.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.handoff import RemoteKv
from disagg.errors import PreparationError

PROTOCOL = 1
_MAX_FRAME = 256 * 1024**2
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class TransferError(Exception):
    """The KV could not be read; the message is for the log."""


class Frames(asyncio.Protocol, ABC):
    """Splits a connection into frames."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of frames; what is no frame closes the connection."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > _MAX_FRAME:
                self.transport.abort()
                return
            if len(self._buffer) < 4 + length:
                return
            frame = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                message = _decode(frame)
            except msgspec.DecodeError:
                self.transport.abort()
                return
            if not isinstance(message, list) or not message:
                self.transport.abort()
                return
            self.frame(message)

    def send(self, *message: object) -> None:
        """Send one frame."""
        data = _encode(message)
        self.transport.write(len(data).to_bytes(4, "big") + data)

    @abstractmethod
    def frame(self, message: list[Any]) -> None:
        """One message has arrived."""


class SideChannel:
    """What other engines may ask of this one.

    Args:
        engine: Whose blocks are read.
        now: The engine's clock.
        gate: Called with a function to run at once, or later while the engine is frozen or its link is slow.
    """

    def __init__(self, engine: Engine, now: Callable[[], float], gate: Callable[[Callable[[], None]], None]) -> None:
        self.engine = engine
        self.now = now
        self.gate = gate
        self.peers: set[_Peer] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            PreparationError: If the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(lambda: _Peer(self), host, port)
        except (OSError, OverflowError) as error:
            raise PreparationError(
                f"Cannot listen on {host} side-channel port {port}: {error}.",
                hint="Choose another --side-channel-port, or stop what uses it.",
            ) from error
        return int(self._listener.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Stop listening and drop all peers."""
        if self._listener is not None:
            self._listener.close()
        for peer in tuple(self.peers):
            peer.transport.abort()


class _Peer(Frames):
    """One decode engine that is connected."""

    def __init__(self, channel: SideChannel) -> None:
        super().__init__()
        self._channel = channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._channel.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.peers.discard(self)

    def frame(self, message: list[Any]) -> None:
        self._channel.gate(lambda: self._answer(message))

    def _answer(self, message: list[Any]) -> None:
        if self.transport.is_closing():
            return
        engine = self._channel.engine
        match message:
            case ["meta"]:
                settings = engine.settings
                self.send(PROTOCOL, settings.engine_id, settings.model, settings.block_size)
            case ["read", list() as blocks]:
                try:
                    self.send(engine.pool.read_raw(blocks))
                except (IndexError, TypeError) as error:
                    self.send(None, str(error))
            case ["done", str(request_id)]:
                engine.collect(request_id)
            case ["beat", list() as request_ids]:
                now = self._channel.now()
                for request_id in request_ids:
                    engine.leases.renew(request_id, now)
            case _:
                self.transport.abort()


class _Link(Frames):
    """A connection to one prefill engine. Answers come in the order of the questions."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[asyncio.Future[list[Any]]] = deque()
        self.block_size = 0

    @property
    def open(self) -> bool:
        return not self.transport.is_closing()

    async def ask(self, *message: object) -> list[Any]:
        if not self.open:
            raise TransferError("the connection to the prefill engine is closed")
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.send(*message)
        return await answer

    def frame(self, message: list[Any]) -> None:
        if not self._answers:
            self.transport.abort()
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(TransferError("the prefill engine closed the connection"))


class Puller:
    """Reads KV from prefill engines; one connection per incarnation, kept until it breaks.

    Args:
        model: This engine's model string; a peer with another one is refused.
        block_size: This engine's tokens per block.
        timeout_s: Wait for a peer to introduce itself.
        settle_failures: Spend the whole wait even on a failure that is known at once, as the real connector does
            when it is told to fail.
    """

    def __init__(self, model: str, block_size: int, timeout_s: float, *, settle_failures: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._timeout_s = timeout_s
        self._settle_failures = settle_failures
        self._links: dict[str, asyncio.Task[_Link]] = {}

    async def read(self, remote: RemoteKv, count: int, *, notify: bool = True) -> tuple[bytes, int]:
        """Read the last `count` blocks of a prompt and, unless told not to, let their owner free them.

        Returns:
            The content and the owner's tokens per block.

        Raises:
            TransferError: If the owner cannot be reached, is another engine, or refuses.
        """
        link = await self._link(remote)
        size = link.block_size
        if size > self._block_size or self._block_size % size:
            raise TransferError(f"Local block size {self._block_size} is not divisible by remote block size {size}")
        answer = await link.ask("read", list(remote.blocks[-count:]) if count else [])
        if not isinstance(answer[0], bytes):
            raise TransferError(f"the prefill engine refused the read: {answer[-1]}")
        if notify:
            link.send("done", remote.request_id)
        return answer[0], size

    def notify(self, remote: RemoteKv) -> None:
        """Tell the owner that its KV was read, if it is connected."""
        task = self._links.get(remote.engine_id)
        if task is not None and task.done() and task.result().open:
            task.result().send("done", remote.request_id)

    async def release(self, remote: RemoteKv) -> None:
        """Tell the owner that nobody will read.

        Raises:
            TransferError: If it cannot be reached; its lease will end by itself.
        """
        link = await self._link(remote)
        if link.open:
            link.send("done", remote.request_id)

    def beat(self, waiting: dict[str, list[str]]) -> None:
        """Renew the leases of requests that wait here, by engine id; peers that are not connected are left out."""
        for engine_id, request_ids in waiting.items():
            task = self._links.get(engine_id)
            if task is not None and task.done() and task.result().open:
                task.result().send("beat", request_ids)

    def connect(self, remote: RemoteKv) -> None:
        """Begin a connection that will be needed, so that heartbeats can go out before the read."""
        if remote.engine_id not in self._links:
            task = asyncio.get_running_loop().create_task(self._open(remote))
            self._links[remote.engine_id] = task
            task.add_done_callback(lambda done: self._forget_failure(remote.engine_id, done))

    def _forget_failure(self, engine_id: str, task: asyncio.Task[_Link]) -> None:
        # Whoever waits for the connection is told; with nobody waiting (a client that left) nobody has to be.
        if (task.cancelled() or task.exception() is not None) and self._links.get(engine_id) is task:
            del self._links[engine_id]

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._links.values())
        self._links.clear()
        for task in tasks:
            task.cancel()
        for link in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(link, _Link):
                link.transport.abort()

    async def _link(self, remote: RemoteKv) -> _Link:
        known = self._links.get(remote.engine_id)
        if known is not None and known.done() and not known.result().open:
            # It was connected, so the process behind it is gone: no need to wait for a handshake.
            del self._links[remote.engine_id]
            raise TransferError(f"the connection to engine {remote.engine_id} is broken")
        self.connect(remote)
        return await asyncio.shield(self._links[remote.engine_id])

    async def _open(self, remote: RemoteKv) -> _Link:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        link: _Link | None = None
        try:
            if not remote.host:
                raise OSError("the handle names no host")
            async with asyncio.timeout(self._timeout_s):
                _, link = await loop.create_connection(_Link, remote.host, remote.port)
                answer = await link.ask("meta")
            return self._introduce(remote, link, answer)
        except (OSError, TimeoutError, TransferError, OverflowError) as error:
            if link is not None:
                link.transport.abort()
            unreachable = not isinstance(error, TransferError)
            if unreachable or self._settle_failures:
                await asyncio.sleep(max(0.0, begun + self._timeout_s - loop.time()))
            raise TransferError(f"no handshake with engine {remote.engine_id}: {error}") from error

    def _introduce(self, remote: RemoteKv, link: _Link, answer: list[Any]) -> _Link:
        if len(answer) != 4 or answer[0] != PROTOCOL:
            raise TransferError("the peer is not an emulated engine of this version")
        _, engine_id, model, block_size = answer
        if engine_id != remote.engine_id:
            raise TransferError(f"the peer is engine {engine_id}")
        if model != self._model:
            raise TransferError(
                f"NIXL compatibility hash mismatch: the peer serves {model}, this engine {self._model}"
            )
        link.block_size = block_size
        return link
