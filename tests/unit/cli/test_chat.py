"""`disagg chat` against a scripted endpoint."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console

from disagg.cli import chat
from disagg.cli.chat_client import AnswerStats, Endpoint, list_models, stream_chat
from disagg.cli.main import main
from disagg.errors import BadRequestError, UpstreamProtocolError, UpstreamUnreachableError


class _Script(BaseHTTPRequestHandler):
    """Answers what the test laid out, and keeps the bodies it was sent."""

    frames: ClassVar[list[bytes]] = []
    status: ClassVar[int] = 200
    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-disagg-path", "disaggregated")
        self.send_header("x-disagg-prefill", "prefill-0")
        self.send_header("x-disagg-decode", "decode-1")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["authorization"])
        if self.status != 200:
            self._send(self.status, "application/json", b'{"error":{"message":"prompt too long"}}')
        else:
            self._send(200, "text/event-stream", b"".join(b"data: " + f + b"\n\n" for f in self.frames))


GOOD = [
    b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    b'{"choices":[{"delta":{"content":"Par"},"finish_reason":null}]}',
    b'{"choices":[{"delta":{"content":"is"},"finish_reason":"stop"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}',
    b"[DONE]",
]


@pytest.fixture
def url() -> Iterator[str]:
    _Script.frames, _Script.status, _Script.bodies, _Script.keys = GOOD, 200, [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_is_printed_with_its_path(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One question, one streamed answer, and below it which instances made it."""
    assert main(["chat", "--url", url, "--message", "capital of France?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris\n"
    assert "7 prompt + 2 answer tokens" in err
    assert "disaggregated (prefill-0 -> decode-1)" in err
    assert _Script.bodies[0]["model"] == "tiny"
    assert _Script.bodies[0]["messages"] == [{"role": "user", "content": "capital of France?"}]


def test_a_conversation_remembers_its_turns_and_clear_forgets_them(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second question is sent with the first and its answer; after /clear only the system prompt is left."""
    words = iter(["one", "two", "/clear", "/help", "three", "/exit"])
    talk = chat.Conversation(Endpoint(url), "tiny", {}, "be brief", Console(stderr=True))
    assert chat._interactive(talk, Console(stderr=True), lambda _: next(words)) == 0
    sent = [[m["content"] for m in body["messages"]] for body in _Script.bodies]
    assert sent == [["be brief", "one"], ["be brief", "one", "Paris", "two"], ["be brief", "three"]]


def test_the_key_comes_from_the_environment_and_is_never_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are neither flags nor part of what gets printed."""
    monkeypatch.setenv("DISAGG_API_KEY", "s3cret")
    assert main(["chat", "--url", url, "-m", "hello"]) == 0
    assert _Script.keys == ["Bearer s3cret"]
    assert "s3cret" not in repr(Endpoint(url, api_key="s3cret"))


def test_an_error_status_keeps_the_servers_message(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's own words reach the user, with the status and a non-zero exit code."""
    _Script.status = 400
    assert main(["chat", "--url", url, "-m", "hello"]) == 1
    assert "answered 400: prompt too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([GOOD[1], b'{"error":{"message":"decode died"}}', b"[DONE]"], "decode died"),
        ([GOOD[1]], r"ended without \[DONE\]"),
        ([b"{oops"], "not JSON"),
    ],
)
def test_a_broken_stream_is_an_error_not_a_short_answer(url: str, frames: list[bytes], says: str) -> None:
    """An answer that ends early is never passed off as a whole one."""
    _Script.frames = frames
    with pytest.raises(UpstreamProtocolError, match=says):
        list(stream_chat(Endpoint(url), "tiny", [], {}, AnswerStats()))


def test_nobody_there_says_how_to_go_on() -> None:
    """The commonest mistake is that the server is not running."""
    with pytest.raises(UpstreamUnreachableError, match="Is `disagg serve` running there"):
        list_models(Endpoint("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:8000", "ftp://x", "", "http://", "http://x:99999", "http://[::1", "http://..", "http://a b"],
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    """A missing scheme is a clear message, not a traceback."""
    with pytest.raises(BadRequestError, match="--url"):
        list_models(Endpoint(address))


@pytest.mark.parametrize("key", ["s3cret\nX-Other: y", "s3cret☃"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """The library's own error would print it."""
    monkeypatch.setenv("DISAGG_API_KEY", key)
    assert main(["chat", "--url", url, "-m", "hello"]) == 2
    err = capsys.readouterr().err
    assert "DISAGG_API_KEY" in err
    assert "s3cret" not in err


def test_a_line_end_behind_the_key_does_no_harm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come out of files."""
    monkeypatch.setenv("DISAGG_API_KEY", "s3cret\n")
    assert main(["chat", "--url", url, "-m", "hello"]) == 0
    assert _Script.keys == ["Bearer s3cret"]


@pytest.mark.parametrize("flag", ["--timeout=-1", "--timeout=nan", "--timeout=1e300", "--temperature=nan"])
def test_numbers_that_are_none_are_refused(flag: str) -> None:
    """As wrong flags, not as tracebacks of the socket."""
    with pytest.raises(SystemExit) as left:
        main(["chat", flag, "-m", "hello"])
    assert left.value.code == 2


def test_events_of_an_odd_shape_are_passed_over(url: str) -> None:
    """Servers differ in what they leave null; text is shown, the rest is not a reason to fail."""
    odd = [
        b'{"choices":null,"usage":{"completion_tokens":"x"}}',
        b'{"choices":[1,{"delta":null},{"delta":{"content":3}}]}',
    ]
    _Script.frames = [*odd, *GOOD]
    stats = AnswerStats()
    assert "".join(stream_chat(Endpoint(url), "tiny", [], {}, stats)) == "Paris"
    assert stats.completion_tokens == 2


def test_text_that_the_terminal_cannot_show_is_escaped(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A lone surrogate, which JSON can carry, is in no encoding."""
    _Script.frames = [b'{"choices":[{"delta":{"content":"a\\ud800b"}}]}', b"[DONE]"]
    assert main(["chat", "--url", url, "-m", "hello"]) == 0
    assert capsys.readouterr().out == "a\\ud800b\n"


def test_a_question_that_is_not_text_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piping a binary file into the command is a clear error."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["chat", "--url", url]) == 2
