"""The connections of a decode engine to prefill engines: reading KV, or waiting for it to be sent."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

from disagg.engines.emulated.bootstrap import Directory
from disagg.engines.emulated.handoff import Fetched, RemoteKv
from disagg.engines.emulated.side_channel import PROTOCOL, Frames, TransferError


class _Link(Frames):
    """A connection to one prefill engine. Answers come in the order of the questions."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: deque[asyncio.Future[list[Any]]] = deque()
        self._awaited: dict[str, asyncio.Future[list[Any]]] = {}
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

    async def wait_for(self, key: str) -> list[Any]:
        """Ask for KV that may not be there yet; it comes in its own time, not in the order of the questions."""
        if not self.open:
            raise TransferError("the connection to the prefill engine is closed")
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._awaited[key] = answer
        self.send("await", key)
        try:
            return await answer
        except asyncio.CancelledError:
            if self.open:
                self.send("forget", key)
            raise
        finally:
            self._awaited.pop(key, None)

    def frame(self, message: list[Any]) -> None:
        if message[0] == "kv" and len(message) == 6:
            awaited = self._awaited.get(message[1])
            if awaited is not None and not awaited.done():
                awaited.set_result(message)
            return
        if not self._answers:
            self.transport.abort()
            return
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [*self._answers, *self._awaited.values()]
        self._answers.clear()
        for answer in waiting:
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
        self._receivers: dict[str, _Link] = {}
        self._directory = Directory(timeout_s)

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
        link = _connected(self._links.get(remote.engine_id))
        if link is not None and link.open:
            link.send("done", remote.request_id)

    async def receive(self, remote: RemoteKv, count: int, timeout_s: float) -> Fetched:
        """Wait until the owner of KV sends it: the last `count` blocks of a prompt.

        Raises:
            TransferError: If the owner cannot be reached, is another engine, dies, or sends nothing in time.
        """
        link = await self._link(await self.located(remote))
        try:
            async with asyncio.timeout(timeout_s):
                _, _, data, size, cached, first = await link.wait_for(remote.key)
        except TimeoutError as error:
            raise TransferError(f"no KV for {remote.key} within {timeout_s:g} s") from error
        if size != self._block_size:
            raise TransferError(f"Local block size {self._block_size} is not the remote block size {size}")
        return Fetched(data[-count * size * 8 :] if count else b"", size, cached, first)

    async def located(self, remote: RemoteKv) -> RemoteKv:
        """Where KV is, asked of the bootstrap server if there is one.

        Raises:
            TransferError: If that does not know.
        """
        if not remote.bootstrap:
            return remote
        if not remote.engine_id:
            engine_id, host, port = await self._directory.route(remote.bootstrap)
            return replace(remote, engine_id=engine_id, host=host, port=port)
        host, port = await self._directory.worker(remote.bootstrap, remote.engine_id)
        return replace(remote, host=host, port=port)

    async def send_ahead(self, host: str, port: int, content: tuple[int, list[int], bytes]) -> None:
        """Send blocks, by tokens per block, prefix keys and content, into a decode engine's buffer.

        Raises:
            TransferError: If it cannot be reached.
        """
        size, keys, data = content
        name = f"{host}:{port}"
        known = self._receivers.get(name)
        try:
            if known is None or not known.open:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(self._timeout_s):
                    _, known = await loop.create_connection(_Link, host, port)
                self._receivers[name] = known
            await known.ask("store", size, keys, data)
        except (OSError, TimeoutError, OverflowError) as error:
            raise TransferError(f"the receiver {name} cannot be reached: {error}") from error

    async def release(self, remote: RemoteKv) -> None:
        """Tell the owner that nobody will read.

        Raises:
            TransferError: If it cannot be reached; its lease will end by itself.
        """
        link = await self._link(await self.located(remote))
        if link.open:
            link.send(*(("forget", remote.key) if remote.key else ("done", remote.request_id)))

    def beat(self, waiting: dict[str, list[str]]) -> None:
        """Renew the leases of requests that wait here, by engine id; peers that are not connected are left out."""
        for engine_id, request_ids in waiting.items():
            link = _connected(self._links.get(engine_id))
            if link is not None and link.open:
                link.send("beat", request_ids)

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
        await self._directory.close()
        for receiver in self._receivers.values():
            receiver.transport.abort()
        self._receivers.clear()
        tasks = list(self._links.values())
        self._links.clear()
        for task in tasks:
            task.cancel()
        for link in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(link, _Link):
                link.transport.abort()

    async def _link(self, remote: RemoteKv) -> _Link:
        link = _connected(self._links.get(remote.engine_id))
        if link is not None and not link.open:
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
        except asyncio.CancelledError:
            if link is not None:
                link.transport.abort()
            raise
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


def _connected(task: asyncio.Task[_Link] | None) -> _Link | None:
    """The connection that a task has made; None if it has not, or has failed and was not forgotten yet."""
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()
