"""The side channel: who may read, how a reader learns that the other side is wrong, gone or restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.handoff import LocalSide, RemoteKv
from disagg.engines.emulated.side_channel import SideChannel, TransferError
from disagg.engines.emulated.transfer import Puller
from disagg.errors import PreparationError
from tests.unit.engines_emulated.running import SETTINGS


def at_once(action: Callable[[], None]) -> None:
    action()


@asynccontextmanager
async def owner(**changes: object) -> AsyncIterator[tuple[Engine, RemoteKv]]:
    """A prefill engine with a side channel and one pinned request, whose KV it is."""
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    engine = Engine(settings, LocalSide(settings.engine_id, "127.0.0.1", 0))
    channel = SideChannel(engine, lambda: 0.0, at_once)
    port = await channel.start("127.0.0.1", 0)
    blocks = engine.pool.allocate(2)
    assert blocks is not None
    engine.pool.write(blocks, 0, 0, list(range(1, 20)))
    engine.leases.pin("r", blocks, 0.0)
    try:
        yield engine, RemoteKv(settings.engine_id, "r", "127.0.0.1", port, tuple(blocks))
    finally:
        channel.stop()


@asynccontextmanager
async def reader(model: str = "toy", block_size: int = 16, *, settle: bool = False) -> AsyncIterator[Puller]:
    puller = Puller(model, block_size, 0.2, settle_failures=settle)
    try:
        yield puller
    finally:
        await puller.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_a_read_brings_the_content_and_frees_the_owner() -> None:
    """The last blocks that were asked for, byte by byte; afterwards the owner holds nothing."""
    async with owner() as (engine, remote), reader() as puller:
        whole = engine.pool.read_raw(remote.blocks)
        data, size = await puller.read(remote, 1)
        assert (data, size) == (whole[128:], 16)
        await until(lambda: len(engine.leases) == 0)
        assert engine.pool.free_blocks == engine.pool.num_blocks


async def test_many_reads_at_once_share_one_connection_and_keep_their_order() -> None:
    """Answers are matched to questions, also when a hundred requests start together."""
    async with owner() as (engine, remote), reader() as puller:
        wanted = [replace(remote, blocks=(n,)) for n in range(100)]
        results = await asyncio.gather(*(puller.read(r, 1) for r in wanted))
        assert [data for data, _ in results] == [engine.pool.read_raw([n]) for n in range(100)]
        assert len(puller._links) == 1


@pytest.mark.parametrize("settle", [False, True])
async def test_another_incarnation_is_refused(settle: bool) -> None:
    """The address is right and the engine is not: no block is read."""
    async with owner() as (engine, remote), reader(settle=settle) as puller:
        with pytest.raises(TransferError, match="the peer is engine engine-a"):
            await puller.read(replace(remote, engine_id="gone"), 1)
        assert len(engine.leases) == 1


async def test_another_model_or_block_size_is_refused() -> None:
    """What would be garbage in every case is refused by the handshake."""
    async with owner() as (_, remote):
        async with reader(model="/absolute/toy") as puller:
            with pytest.raises(TransferError, match="compatibility hash mismatch"):
                await puller.read(remote, 1)
        async with reader(block_size=8) as puller:
            with pytest.raises(TransferError, match="not divisible by remote block size 16"):
                await puller.read(remote, 1)


async def test_impossible_blocks_are_refused_and_the_connection_stays() -> None:
    """The next read of the same peer works."""
    async with owner() as (_, remote), reader() as puller:
        with pytest.raises(TransferError, match="refused the read"):
            await puller.read(replace(remote, blocks=(10**6,)), 1)
        assert await puller.read(remote, 2)


async def test_a_peer_that_is_not_there_or_says_nothing_times_out() -> None:
    """A closed port and a silent listener both end after the handshake's limit."""
    silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with reader() as puller:
        for port in (1, silent.sockets[0].getsockname()[1]):
            with pytest.raises(TransferError, match="no handshake"):
                await puller.read(RemoteKv(f"e{port}", "r", "127.0.0.1", port, (0,)), 1)
    silent.close()


async def test_an_owner_that_dies_ends_reads_at_once_and_its_successor_is_reached() -> None:
    """A broken connection fails without a wait; the same port with a new incarnation is a new connection."""
    async with reader() as puller:
        async with owner() as (_, remote):
            await puller.read(remote, 1)
            link = puller._links[remote.engine_id].result()
        await until(lambda: not link.open)
        with pytest.raises(TransferError, match="is broken"):
            await puller.read(remote, 1)
        async with owner(engine_id="engine-b") as (_, successor):
            assert await puller.read(successor, 1)


async def test_what_is_no_frame_closes_the_connection_and_harms_nothing() -> None:
    """Anybody can connect to a port."""
    async with owner() as (engine, remote):
        for junk in (
            b"\xff\xff\xff\xff",
            b"\x00\x00\x00\x01\xc1",
            b"\x00\x00\x00\x01\x01",
            b"\x00\x00\x00\x02\x91\xa0",
        ):
            stream, writer = await asyncio.open_connection("127.0.0.1", remote.port)
            writer.write(junk)
            with contextlib.suppress(ConnectionResetError):
                assert await stream.read() == b""
            writer.close()
        assert len(engine.leases) == 1


async def test_a_port_that_is_taken_is_an_error_with_advice() -> None:
    """The message names the port and what to do."""
    async with owner() as (engine, remote):
        with pytest.raises(PreparationError, match="side-channel port"):
            await SideChannel(engine, lambda: 0.0, at_once).start("127.0.0.1", remote.port)


async def test_a_heartbeat_in_the_turn_in_which_a_handshake_failed_is_left_out() -> None:
    """The connection's failure is known one turn before it is forgotten: that must not end the engine."""
    async with reader() as puller:
        remote = RemoteKv("gone", "r", "127.0.0.1", 1, (0,))
        seen: list[bool] = []

        def at_once(_: object) -> None:
            # Called before the puller's own callback, which forgets the connection.
            puller.beat({"gone": ["r"]})
            puller.notify(remote)
            seen.append(True)

        task = asyncio.get_running_loop().create_task(puller._open(remote))
        task.add_done_callback(at_once)
        puller._links["gone"] = task
        await until(lambda: bool(seen))
        assert task.exception() is not None
