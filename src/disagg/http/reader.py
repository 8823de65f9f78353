"""From bytes to requests: a push parser without a socket, strict about everything that could smuggle a request."""

from __future__ import annotations

from collections import deque
from enum import Enum

import httptools

from disagg.errors import BadRequestError, ClientError, HeadersTooLargeError, PayloadTooLargeError
from disagg.http.limits import ServerLimits
from disagg.http.messages import Header, Request

# A chunked body may spend this many bytes on framing and trailers beside eight times its payload.
_FRAMING_ALLOWANCE = 1024**2


class Phase(Enum):
    """Where in a request the reader is."""

    IDLE = 0
    HEAD = 1
    BODY = 2


class RequestReader:
    """Parses one connection's bytes. After a refusal it reads nothing more: the connection has to be closed.

    Attributes:
        requests: Complete requests that nobody has taken yet, in order.
        refusal: Why the rest of the connection cannot be read.
        phase: What the next byte belongs to.
        wants_continue: The client waits for ``100 Continue`` before it sends the body.
    """

    def __init__(self, limits: ServerLimits, peer: str = "") -> None:
        self.requests: deque[Request] = deque()
        self.refusal: ClientError | None = None
        self.phase = Phase.IDLE
        self.wants_continue = False
        self._limits = limits
        self._peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self._restarting = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: list[Header] = []
        self._header_bytes = 0
        self._raw_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._chunked = False
        self._length: bytes | None = None
        self._upgrade = False
        self._request: Request | None = None

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the connection; results are in `requests`, `refusal`, `phase`."""
        if self.refusal is not None:
            return
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.refusal is None:
                self.refusal = BadRequestError(f"The request is not valid HTTP/1.1: {error}.")
        if self.phase is Phase.HEAD and self._raw_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
        elif self._chunked and self._raw_bytes > _FRAMING_ALLOWANCE + 8 * self._body_bytes:
            self._refuse(BadRequestError("The chunked body is mostly framing."))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 after a request that offered another protocol.

        The parser takes such a request as complete at the end of its headers. A fresh parser that is told the same
        framing reads the body that follows.
        """
        if self.refusal is not None:
            return
        self._parser = httptools.HttpRequestParser(self)
        if self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing = b"content-length: %b\r\n" % (self._length or b"0")
        self._restarting = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        if rest:
            # `feed` counts what it is given; these bytes are counted already.
            self._raw_bytes -= len(rest)
            self.feed(rest)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """A request line follows."""
        if not self._restarting:
            self.phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        """The target, possibly in pieces."""
        if not self._restarting:
            self._url += url
            self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line, or a trailer, which is dropped."""
        if self._restarting or self.phase is not Phase.HEAD:
            return
        self._header_bytes += len(name) + len(value) + 4
        self._headers.append((name.lower(), value))
        if self._header_bytes > self._limits.max_header_bytes or len(self._headers) > self._limits.max_headers:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        """Check the head, and decide about the body before it is read."""
        if self._restarting:
            self._restarting = False
            return
        self.phase = Phase.BODY
        if self.refusal is not None:
            return
        parser = self._parser
        self._upgrade = parser.should_upgrade()
        version = parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            self._refuse(BadRequestError(f"HTTP/{version} is not served on this port; HTTP/1.1 is."))
        http_1_0 = version == "1.0"
        expects = self._check_headers(http_1_0)
        if self.refusal is not None:
            return
        target = self._target(parser.get_method())
        path, _, _ = target.partition("?")
        method = parser.get_method().decode("ascii")
        keep_alive = parser.should_keep_alive()
        self._request = Request(method, target, path, self._headers, b"", http_1_0, keep_alive, self._peer)
        self.wants_continue = expects and not http_1_0 and (self._chunked or self._length not in {None, b"0"})

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self.refusal is not None:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """The request is complete, unless it was refused on the way."""
        if self._upgrade:
            # The parser stops here although a body may follow: `_ignore_upgrade` reads it.
            self._upgrade = False
            return
        request = self._request
        if self.refusal is None and request is not None:
            body = self._body
            request.body = body[0] if len(body) == 1 else b"".join(body)
            self.requests.append(request)
        self.wants_continue = False
        self.phase = Phase.IDLE
        self._reset()

    # Checks.

    def _check_headers(self, http_1_0: bool) -> bool:
        """Refuse what two servers could read differently; returns whether the client expects a 100."""
        hosts = 0
        expects = False
        for name, value in self._headers:
            if name == b"content-length":
                self._check_length(value)
            elif name == b"transfer-encoding":
                if self._chunked or http_1_0 or value.strip().lower() != b"chunked":
                    self._refuse(BadRequestError("Transfer-Encoding can only be one 'chunked', in HTTP/1.1."))
                self._chunked = True
            elif name == b"host":
                hosts += 1
            elif name == b"expect":
                if value.strip().lower() != b"100-continue":
                    self._refuse(BadRequestError("The only expectation that can be met is 100-continue."))
                expects = True
        if self._chunked and self._length is not None:
            self._refuse(BadRequestError("A request has either Content-Length or Transfer-Encoding, not both."))
        if hosts > 1 or (hosts == 0 and not http_1_0):
            self._refuse(BadRequestError("A request in HTTP/1.1 has exactly one Host header."))
        return expects

    def _check_length(self, value: bytes) -> None:
        text = value.strip()
        if self._length is not None or not text.isdigit() or len(text) > 18:
            self._refuse(BadRequestError("Content-Length has to be one decimal number."))
            return
        self._length = text
        if int(text) > self._limits.max_body_bytes:
            self._refuse_body()

    def _target(self, method: bytes) -> str:
        url = self._url.decode("latin-1")
        if method == b"CONNECT":
            self._refuse(BadRequestError("This is not a proxy: CONNECT is not served."))
        elif not url.startswith("/") and url != "*":
            # Absolute form: a client that takes this for a proxy. Only the path matters here.
            _, _, after_scheme = url.partition("://")
            slash = after_scheme.find("/")
            return after_scheme[slash:] if slash >= 0 else "/"
        return url

    def _refuse(self, error: ClientError) -> None:
        if self.refusal is None:
            self.refusal = error
            self.wants_continue = False

    def _refuse_headers(self) -> None:
        limit = self._limits
        self._refuse(
            HeadersTooLargeError(
                f"The headers are over the limit of {limit.max_header_bytes} bytes or {limit.max_headers} lines."
            )
        )

    def _refuse_body(self) -> None:
        self._refuse(
            PayloadTooLargeError(
                f"The body is over the limit of {self._limits.max_body_bytes} bytes.",
                hint="Send less, or raise router.max_body_bytes.",
            )
        )
