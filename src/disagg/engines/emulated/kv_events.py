"""KV events on ZeroMQ, as vLLM publishes them, for routers that follow what each engine has in its prefix cache."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec
import zmq

from disagg.engines.emulated.cache_events import EventsConfig
from disagg.errors import PreparationError

_END = (-1).to_bytes(8, "big", signed=True)
_encode = msgspec.msgpack.Encoder().encode


class Publisher:
    """Sends batches of events, each with a number, and repeats them to those who ask.

    Args:
        config: Where and how.

    Raises:
        PreparationError: If an address cannot be bound.
    """

    def __init__(self, config: EventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            if "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith(("ipc:", "inproc:")):
                self._pub.bind(config.endpoint)
            else:
                self._pub.connect(config.endpoint)
            if config.replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise PreparationError(
                f"KV events cannot be published at {config.endpoint} (replay {config.replay_endpoint}): {error}.",
                hint="Choose other endpoints in --kv-events-config, or stop what uses them.",
            ) from error
        if self._replay is not None:
            asyncio.get_running_loop().add_reader(int(self._replay.FD), self.answer)

    @property
    def endpoint(self) -> str:
        """Where events come from, with the port that the system chose."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT) or self._config.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where they can be asked for again."""
        return None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def sources(self) -> dict[str, dict[str, object]]:
        """What `/kv_event_sources` answers."""
        config = self._config
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint,
                "buffer_steps": config.buffer_steps,
                "hwm": config.hwm,
                "max_queue_size": config.max_queue_size,
                "topic": config.topic,
            }
        }

    def publish(self, events: list[dict[str, object]]) -> None:
        """Send one batch. What a slow reader cannot take is lost to it, as its number tells."""
        if self._config.event_format == "array":
            shown: list[object] = [list(event.values()) for event in events]
        else:
            shown = list(events)
        payload = _encode([time.time(), shown, 0])
        number = self._next
        self._next += 1
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.DONTWAIT)
        self.answer()

    def answer(self) -> None:
        """Repeat batches to those who have asked. The descriptor tells of a change only once, so all are taken."""
        replay = self._replay
        while replay is not None:
            try:
                frames = replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3:
                continue
            peer, _, start = frames
            first = int.from_bytes(start, "big")
            for number, payload in self._kept:
                if number >= first:
                    replay.send_multipart((peer, b"", self._topic, number.to_bytes(8, "big"), payload))
            replay.send_multipart((peer, b"", b"", _END, b""))

    def close(self) -> None:
        """Stop at once."""
        if self._replay is not None:
            if not self._replay.closed:
                asyncio.get_running_loop().remove_reader(int(self._replay.FD))
            self._replay.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()
