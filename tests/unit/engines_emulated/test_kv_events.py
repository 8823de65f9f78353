"""KV events: what a subscriber hears of an engine's prefix cache, and can ask for again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from disagg.engines.emulated.cache_events import EventsConfig, read_events_config
from disagg.errors import ConfigError
from tests.support.wire import request
from tests.unit.engines_emulated.running import SETTINGS, Running, running

CONFIG = EventsConfig(
    enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv"
)
PROMPT = {"prompt": list(range(300, 340)), "max_tokens": 1, "ignore_eos": True}


def sources(up: Running) -> dict[str, Any]:
    found: dict[str, Any] = request(up.url(), "/kv_event_sources").json()["0"]
    return found


def replayed(up: Running, start: int = 0) -> list[tuple[int, Any]]:
    """All batches from a number on, by the replay socket."""
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, 20_000)
    asker.connect(sources(up)["replay_endpoint"])
    asker.send_multipart((b"", start.to_bytes(8, "big")))
    out: list[tuple[int, Any]] = []
    try:
        while True:
            _, topic, number, payload = asker.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return out
            assert topic == b"kv"
            out.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    finally:
        asker.close(linger=0)
        context.term()


@pytest.fixture
def up() -> Iterator[Running]:
    with running(replace(SETTINGS, kv_events=CONFIG)) as engines:
        yield engines


def test_stored_blocks_chain_to_their_parent(up: Running) -> None:
    """Two full blocks of 40 tokens: maps with hash, parent, tokens; a second request adds none."""
    for _ in range(2):
        assert request(up.url(), "/v1/completions", PROMPT).status == 200
    ((number, (_, stored, rank)),) = replayed(up)
    assert (number, rank) == (0, 0)
    first, second = stored
    assert first["type"] == second["type"] == "BlockStored"
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][0]
    assert first["token_ids"] + second["token_ids"] == list(range(300, 332))
    assert (first["block_size"], first["medium"]) == (16, "GPU")


def test_a_subscriber_hears_three_frames(up: Running) -> None:
    """Topic, number, payload, as they happen."""
    context = zmq.Context()
    hears = context.socket(zmq.SUB)
    hears.setsockopt(zmq.RCVTIMEO, 200)
    hears.setsockopt_string(zmq.SUBSCRIBE, "kv")
    hears.connect(sources(up)["endpoint"])
    frames: list[bytes] = []
    for attempt in range(100):  # who subscribes late misses what was sent before
        request(up.url(), "/v1/completions", {**PROMPT, "prompt": [300 + attempt] * 40})
        try:
            frames = hears.recv_multipart()
            break
        except zmq.Again:
            continue
    hears.close(linger=0)
    context.term()
    assert (len(frames), frames[0], len(frames[1])) == (3, b"kv", 8)


def test_a_reused_block_is_removed_and_an_emptied_cache_told() -> None:
    """What leaves the cache is told by its hash, and once."""
    tight = replace(SETTINGS, num_blocks=4, max_model_len=64, kv_events=CONFIG)
    with running(tight) as up:
        for token in (300, 400, 500):
            request(up.url(), "/v1/completions", {**PROMPT, "prompt": [token] * 40})
        events = [event for _, (_, batch, _) in replayed(up) for event in batch]
        stored = [h for event in events if event["type"] == "BlockStored" for h in event["block_hashes"]]
        removed = [h for event in events if event["type"] == "BlockRemoved" for h in event["block_hashes"]]
        assert len(removed) == len(set(removed))
        assert 0 < len(stored) - len(removed) <= 4
        assert set(removed) <= set(stored)
        request(up.url(), "/emulated/clear-cache", b"", method="POST")
        assert replayed(up)[-1][1][1] == [{"type": "AllBlocksCleared"}]


def test_replay_begins_where_it_is_asked_to(up: Running) -> None:
    """Only batches from that number on, then the end."""
    for token in (300, 400, 500):
        request(up.url(), "/v1/completions", {**PROMPT, "prompt": [token] * 20})
    assert [number for number, _ in replayed(up, 1)] == [1, 2]


def test_older_releases_send_arrays() -> None:
    """With that format an event is a list that begins with its type."""
    config = msgspec.structs.replace(CONFIG, event_format="array")
    with running(replace(SETTINGS, kv_events=config)) as up:
        request(up.url(), "/v1/completions", PROMPT)
        ((_, (_, stored, _)),) = replayed(up)
        assert stored[0][0] == "BlockStored"
        assert stored[0][3] == list(range(300, 316))


def test_a_restart_counts_anew(up: Running) -> None:
    """Another incarnation has an empty cache and begins at 0."""
    request(up.url(), "/v1/completions", PROMPT)
    assert len(replayed(up)) == 1
    up.call(up.instances[0].restart())
    assert replayed(up) == []


def test_the_flag_is_checked() -> None:
    """Unknown keys are named with those that exist; ports are counted up for further engines."""
    with pytest.raises(ConfigError, match="buffer_steps"):
        read_events_config('{"endpiont": "x"}')
    config = read_events_config('{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}')
    assert config.numbered(3).endpoint == "tcp://*:5560"
    assert config.numbered(3).replay_endpoint is None
