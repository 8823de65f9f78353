"""The access log: one JSON line per request, with what an operator needs and nothing that a client wrote."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from disagg.engines.base import Api
from disagg.http.messages import Request
from disagg.router import access_log
from disagg.router.access_log import AccessLog, Line, make_line
from disagg.router.record import Record
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, rig


class Stream(io.BytesIO):
    """Keeps what it has after it was written."""

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


async def test_a_line_tells_the_story_of_a_request() -> None:
    """Way, engines, times, sizes; fields without a value are left out."""
    stream = Stream()
    async with rig(access_log=True, access_stream=stream) as r:
        await r.ask({"model": MODEL, "prompt": "private words", "stream": True}, x_request_id="mine")
        await r.settled()
    (line,) = stream.lines()
    assert line["request_id"] == "mine"
    assert (line["method"], line["target"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["path"], line["outcome"]) == ("disaggregated", "ok")
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    assert line["client"] == "127.0.0.1"
    assert line["bytes_out"] == len(b"".join(mock.EVENTS))
    assert 0 < line["prefill_s"] < line["first_byte_s"] <= line["total_s"]
    assert line["prompt_tokens"] == 7
    assert line["time"].endswith("+00:00")
    assert not {"reason", "queue_s", "retries", "key", "detail"} & set(line)
    assert "error" not in line


async def test_lines_hold_no_text_and_no_credentials() -> None:
    """Neither of requests that were served nor of those that were not."""
    stream = Stream()
    async with rig(access_log=True, access_stream=stream) as r:
        await r.ask({"model": MODEL, "prompt": "private words"}, authorization="Bearer secret", cookie="secret")
        await r.ask(b'{"prompt": "private words", ')
        await r.ask({"model": MODEL, "prompt": ["private words"], "n": 2}, path="/v1/completions?key=secret")
    assert len(stream.lines()) == 3
    assert b"private" not in stream.getvalue()
    assert b"secret" not in stream.getvalue()


async def test_each_ending_has_its_line() -> None:
    """Refused, failed, broken, and clients that left."""
    stream = Stream()
    async with rig(retries=0, access_log=True, access_stream=stream) as r:
        await r.ask(b"{")
        r.d.script.append(mock.error(503))
        await r.ask()
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="abort"))
        await r.ask({"model": MODEL, "prompt": "x", "stream": True})
        r.d.arrived.clear()
        r.d.default = mock.hangs
        call = await r.call()
        await r.d.arrived.wait()
        await call.close()
        await r.settled()
    lines = stream.lines()
    assert [x["outcome"] for x in lines] == ["refused", "failed", "broken", "client_left"]
    assert [x["status"] for x in lines] == [400, 503, 200, 0]
    assert all(x["bytes_out"] > 20 for x in lines[:2])
    assert [x.get("error") for x in lines] == ["bad-request", "decode-failed", "decode-broken", None]


async def test_without_the_setting_nothing_is_written() -> None:
    """And no thread is started."""
    stream = Stream()
    async with rig(access_stream=stream) as r:
        await r.ask()
    assert stream.getvalue() == b""


async def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full: requests are served all the same, and the lines that were dropped are counted."""
    monkeypatch.setattr(access_log, "MAX_WAITING", 50)
    monkeypatch.setattr(access_log, "_CLOSE_S", 0.01)
    reading, writing = os.pipe()
    request = Request("POST", "/v1/completions", "/v1/completions", [])
    line = make_line(Record(b"id", Api.COMPLETIONS, 0.0), request, 1.0, 2.0)
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        log = AccessLog(writer)
        for _ in range(100):
            for _ in range(40):
                log.add(line)
            log._flush()
        await log.close()
        assert log.dropped.values[()] > 1000
        # So that the thread can end.
        reader.read(1)
        os.set_blocking(reader.fileno(), False)
        while log._thread is not None and log._thread.is_alive():
            reader.read(65536)


async def test_a_reader_that_is_gone_is_no_reason_to_fail() -> None:
    """The rest of the process has other things to do."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as writer:
        async with rig(access_log=True, access_stream=writer) as r:
            assert (await r.ask()).status == 200


async def test_lines_reach_a_pipe_whole() -> None:
    """Pieces of at most 4096 bytes, each ending with a line's end."""
    pieces: list[bytes] = []

    class Pipe(io.BytesIO):
        def write(self, data: Any) -> int:
            pieces.append(bytes(data))
            return len(data)

    async with rig(access_log=True, access_stream=Pipe()) as r:
        for n in range(30):
            await r.ask(x_request_id=f"request-{n}")
    assert all(p.endswith(b"\n") and len(p) <= 4096 for p in pieces)
    ids = [json.loads(line)["request_id"] for p in pieces for line in p.splitlines()]
    assert ids == [f"request-{n}" for n in range(30)]


def test_the_guide_shows_a_line_as_it_is_written() -> None:
    """Its example has the fields of a line, in their order; the further ones that it names exist."""
    guide = (Path(__file__).parents[3] / "docs/guides/monitoring.md").read_text()
    example = json.loads(guide.split("```json\n")[1].split("```")[0])
    fields = list(Line.__struct_fields__)
    assert list(example) == [f for f in fields if f in example]
    further = guide.split("Further ones:")[1].split("Nothing of prompts")[0]
    assert set(re.findall(r"`(\w+)`", further)) == set(fields) - set(example)
