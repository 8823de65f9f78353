"""What happens to the prefix cache, as events, and where they are to be published."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from disagg.engines.emulated.model import MASK
from disagg.errors import ConfigError, Problem

FLAG = "--kv-events-config"


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, with vLLM's keys and one more.

    Attributes:
        enable_kv_cache_events: Publish.
        publisher: `zmq`, or `null` for none.
        endpoint: Where to publish; an address with `*` is bound, any other connected to.
        replay_endpoint: Where past batches can be asked for.
        buffer_steps: Batches that are kept for that.
        hwm: Batches that wait for a slow reader; further ones are lost to it.
        max_queue_size: Accepted, without effect: nothing waits before it is sent.
        topic: First frame of each message.
        event_format: Events as maps, as vLLM 0.32 has them, or as arrays, as older releases had.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    event_format: Literal["map", "array"] = "map"

    @property
    def on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def numbered(self, number: int) -> EventsConfig:
        """The same for another engine beside this one: ports counted up."""
        return msgspec.structs.replace(
            self,
            endpoint=_offset(self.endpoint, number) or self.endpoint,
            replay_endpoint=_offset(self.replay_endpoint, number),
        )


NO_EVENTS = EventsConfig()


def _offset(endpoint: str | None, number: int) -> str | None:
    base, colon, port = (endpoint or "").rpartition(":")
    return f"{base}{colon}{int(port) + number}" if port.isdecimal() and int(port) else endpoint


def read_events_config(text: str) -> EventsConfig:
    """The value of the flag.

    Raises:
        ConfigError: If it is no such JSON, or the package that publishes is missing.
    """
    try:
        config = msgspec.json.decode(text, type=EventsConfig)
    except msgspec.DecodeError as error:
        keys = ", ".join(EventsConfig.__struct_fields__)
        raise ConfigError([Problem(FLAG, f"{error}; it is a JSON object with the keys {keys}")]) from error
    if config.on and importlib.util.find_spec("zmq") is None:
        raise ConfigError([Problem(FLAG, "needs pyzmq; install disagg[kv-events]")])
    return config


@dataclass(slots=True)
class CacheLog:
    """Collects events of one engine between two batches.

    Attributes:
        block_size: Tokens per block.
        events: What happened, oldest first.
    """

    block_size: int
    events: list[dict[str, object]] = field(default_factory=list)

    def stored(self, keys: list[int], parent: int | None, tokens: list[int], adapter: str | None) -> None:
        """Blocks became findable, one behind the other."""
        self.events.append(
            {
                "type": "BlockStored",
                "block_hashes": [key & MASK for key in keys],
                "parent_block_hash": None if parent is None else parent & MASK,
                "token_ids": tokens,
                "block_size": self.block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": adapter,
            }
        )

    def removed(self, key: int) -> None:
        """A block was taken for something else."""
        last = self.events[-1] if self.events else None
        if last is not None and last["type"] == "BlockRemoved":
            hashes = last["block_hashes"]
            if isinstance(hashes, list):
                hashes.append(key & MASK)
            return
        self.events.append({"type": "BlockRemoved", "block_hashes": [key & MASK], "medium": "GPU"})

    def cleared(self) -> None:
        """The cache is empty."""
        self.events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, object]]:
        """The events so far; begins anew."""
        taken, self.events = self.events, []
        return taken
