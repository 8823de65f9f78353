"""Where a request goes, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import msgspec

from disagg.http.messages import Header
from disagg.http.response import Response


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an HTTP server is.

    Attributes:
        host: Name or address, without brackets.
        port: TCP port.
        authority: ``host:port`` as it stands in the `Host` header.
        url: Scheme and authority.
        tls: Whether it speaks TLS.
    """

    host: str
    port: int
    authority: str
    url: str
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read the origin of a URL such as ``http://[::1]:9900``.

        Raises:
            ValueError: If it is not an ``http`` or ``https`` URL with a host.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        authority = f"{host}:{port}"
        return cls(parts.hostname, port, authority, f"{parts.scheme}://{authority}", tls)


class Outgoing(msgspec.Struct, frozen=True):
    """One request to an engine.

    Attributes:
        method: Upper-case method.
        target: Path and query.
        headers: Headers except `Host` and `Content-Length`.
        body: The whole body.
        resend: The request may be sent a second time when a kept connection turns out to have been closed
            before anything of an answer came.
        linger: Asked when the caller is cancelled before the answer has begun: for so many seconds the exchange goes
            on, and its connection is closed at the first byte of the body. None closes it at once.
        late: Takes an answer that begins when its caller is cancelled already, in place of that closing.
    """

    method: str
    target: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    resend: bool = True
    linger: Callable[[], float] | None = None
    late: Callable[[Response], None] | None = None

    def encode(self, origin: Origin) -> bytes:
        """The bytes on the wire."""
        parts = [f"{self.method} {self.target} HTTP/1.1\r\nhost: {origin.authority}\r\n".encode("latin-1")]
        for name, value in self.headers:
            parts += (name, b": ", value, b"\r\n")
        if self.body or self.method not in {"GET", "HEAD", "DELETE"}:
            parts.append(b"content-length: %d\r\n" % len(self.body))
        parts += (b"\r\n", self.body)
        return b"".join(parts)
