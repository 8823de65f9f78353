"""KV between engine processes: the side channel that a prefill engine serves, and the connections of a decode engine.

One frame is four bytes of length and a msgpack array. A decode engine connects once per peer incarnation, asks who
is there, and then reads blocks by id. As with one-sided reads of a real transport, a read is not checked against
requests or leases: whatever is in the blocks is what the reader gets.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import msgspec

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.meetings import Offer
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
        self.stopped = False
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
        self.stopped = True
        if self._listener is not None:
            self._listener.close()
        for peer in tuple(self.peers):
            peer.transport.abort()


class _Peer(Frames):
    """One decode engine that is connected."""

    def __init__(self, channel: SideChannel) -> None:
        super().__init__()
        self._channel = channel
        self._keys: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._channel.stopped:
            # It was accepted before the listener was closed.
            self.transport.abort()
        self._channel.peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel.peers.discard(self)
        for key in self._keys:
            self._channel.engine.meetings.withdraw(key)

    def _give(self, key: str, offer: Offer) -> None:
        """Send KV that was asked for."""
        self._keys.discard(key)
        pool = self._channel.engine.pool
        if not self.transport.is_closing():
            self.send("kv", key, pool.read_raw(offer.blocks), pool.block_size, offer.cached_tokens, offer.first_token)

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
                engine.pool.release(engine.leases.collect(request_id))
            case ["beat", list() as request_ids]:
                now = self._channel.now()
                for request_id in request_ids:
                    engine.leases.renew(request_id, now)
            case _ if not self._meet(message):
                self.transport.abort()

    def _meet(self, message: list[Any]) -> bool:
        """Messages of engines whose legs left together, or that are sent KV ahead. False if it is none."""
        engine = self._channel.engine
        match message:
            case ["await", str(key)]:
                self._keys.add(key)
                engine.pool.release(engine.meetings.ask(key, lambda offer: self._give(key, offer)))
            case ["forget", str(key)]:
                self._keys.discard(key)
                engine.pool.release(engine.meetings.forget(key))
            case ["store", int(size), list() as keys, bytes() as content]:
                if engine.received is not None and size == engine.settings.block_size:
                    for number, key in enumerate(keys):
                        engine.received.store(key, content[number * size * 8 : (number + 1) * size * 8])
                self.send("stored")
            case _:
                return False
        return True
