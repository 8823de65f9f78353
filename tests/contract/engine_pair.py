"""What the contract of an engine with NIXL pull is tested with: two engines, bodies for them, and their metrics."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from tests.support.wire import Answer, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
HANDLE_KEYS = {
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
    *("remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines and the model that both serve."""

    prefill: str
    decode: str
    model: str
    max_model_len: int


def get(url: str, path: str) -> Answer:
    return request(url, path)


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    page = get(url, "/metrics").body.decode()
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    assert values, f"{name} is not on the metrics page of {url}"
    return sum(map(float, values))


def settled(url: str, name: str, value: float) -> None:
    """Wait until a metric has a value; leases, log intervals and steps of a slow machine included."""
    deadline = time.monotonic() + 60
    while (now := metric(url, name)) != pytest.approx(value):
        assert time.monotonic() < deadline, f"{name} of {url} stays at {now}, not {value}"
        time.sleep(0.02)


def fresh(words: int = 40) -> str:
    """A prompt that no engine has seen."""
    return f"{uuid4().hex} " + "the sea is wide and deep " * (words // 6 + 1)


def body(engines: Pair, **fields: Any) -> dict[str, Any]:
    return {"model": engines.model, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}


def chat_body(engines: Pair, text: str, **fields: Any) -> dict[str, Any]:
    return body(engines, messages=[{"role": "user", "content": text}], **fields)


def ok(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json()


def prefill(engines: Pair, path: str, sent: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg: one token, KV kept."""
    leg = {**sent, "max_tokens": 1, "stream": False, "kv_transfer_params": KEEP}
    if path == CHAT:
        leg["max_completion_tokens"] = 1
    answer: dict[str, Any] = ok(request(engines.prefill, path, leg))
    return answer


def words_of(path: str, answer: Any) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if path == CHAT else choice["text"]
    return text
