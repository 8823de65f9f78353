"""The NIXL handoff parameters as vLLM writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV of a prompt that another engine holds, as a decode request names it.

    Attributes:
        engine_id: Incarnation of the engine that holds it.
        request_id: That engine's id of the request.
        host: Its side channel's address.
        port: Its side channel's port.
        blocks: Block ids there, in prompt order.
        prefill_cached_tokens: Prompt tokens that it found in its own cache, if it said so.
        lost: The parameters lack what is needed to find the KV; a real engine parks such a request for good.
        key: What the two legs of a request that left together meet by; empty if decode reads blocks.
        bootstrap: URL of the server that knows where the engine is; empty if host and port say it.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: tuple[int, ...]
    prefill_cached_tokens: int | None = None
    lost: bool = False
    key: str = ""
    bootstrap: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """KV that has arrived.

    Attributes:
        data: Content, eight bytes per position.
        block_size: The sender's tokens per block.
        cached_tokens: Prompt tokens that the sender found in its cache, if it said so.
        first_token: What the sender sampled, if it said so.
    """

    data: bytes
    block_size: int
    cached_tokens: int | None = None
    first_token: int | None = None


class FatalHandoffError(Exception):
    """Parameters on which the real engine's scheduler asserts: the whole engine goes down."""


def read_writer(params: Mapping[str, object]) -> RemoteKv | None:
    """The engine that will write KV for a request of the same id (NIXL push). The key is set when the id is known.

    Raises:
        FatalHandoffError: If it is not named whole.
    """
    if not params.get("do_remote_prefill"):
        return None
    missing = [
        name
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if params.get(name) in (None, "")
    ]
    port = params.get("remote_port")
    if missing or not isinstance(port, int):
        raise FatalHandoffError(f"a push without {', '.join(missing) or 'a port number'}")
    return RemoteKv(
        engine_id=str(params["remote_engine_id"]),
        request_id=str(params["remote_request_id"]),
        host=str(params["remote_host"]),
        port=port,
        blocks=(),
        key="?",
    )


def read_transfer(params: Mapping[str, object]) -> RemoteKv | None:
    """KV that comes under a transfer id (Mooncake).

    Raises:
        FatalHandoffError: If the parameters are not whole.
    """
    if not params.get("do_remote_prefill"):
        return None
    missing = [
        name
        for name in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
        if not isinstance(params.get(name), str) or not params[name]
    ]
    if missing:
        raise FatalHandoffError(f"a transfer without {', '.join(missing)}")
    return RemoteKv(
        engine_id=str(params["remote_engine_id"]),
        request_id=str(params["transfer_id"]),
        host="",
        port=0,
        blocks=(),
        key=str(params["transfer_id"]),
        bootstrap=str(params["remote_bootstrap_addr"]),
    )


def read_remote(params: Mapping[str, object]) -> RemoteKv | None:
    """The KV that these parameters point to, None if the prompt is to be computed here.

    Raises:
        FatalHandoffError: If they ask for remote KV and name no blocks.
    """
    if not params.get("do_remote_prefill"):
        return None
    blocks = params.get("remote_block_ids")
    if not blocks:
        raise FatalHandoffError("do_remote_prefill without remote_block_ids")
    group = blocks[0] if isinstance(blocks, list) else None
    if not isinstance(group, list) or not all(isinstance(block, int) for block in group):
        raise FatalHandoffError("remote_block_ids is not a list of lists of ints")
    named = all(key in params for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"))
    port = params.get("remote_port")
    cached = params.get("remote_prefill_cached_tokens")
    return RemoteKv(
        engine_id=str(params.get("remote_engine_id")),
        request_id=str(params.get("remote_request_id")),
        host=str(params.get("remote_host") or ""),
        port=port if isinstance(port, int) and not isinstance(port, bool) else 0,
        blocks=tuple(group),
        prefill_cached_tokens=cached if isinstance(cached, int) else None,
        lost=not named,
    )


@dataclass(frozen=True, slots=True)
class LocalSide:
    """This engine, as it names itself in handoffs."""

    engine_id: str
    host: str
    port: int


def handle(
    side: LocalSide, request_id: str, blocks: list[int], tokens: int, cached_tokens: int, *, push: bool = False
) -> dict[str, object]:
    """What prefill returns for decode, key by key as vLLM does."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [blocks],
        "remote_engine_id": side.engine_id,
        "remote_request_id": request_id,
        "remote_host": side.host,
        "remote_port": side.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "push" if push else "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }
