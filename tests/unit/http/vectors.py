"""Bytes that two HTTP parsers could read differently. Each hides a request for `/hidden` that nobody must serve."""

from __future__ import annotations

HIDDEN = b"POST /hidden HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"


def _post(*lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /seen HTTP/1.1\r\nHost: h\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


_CHUNKED = b"Transfer-Encoding: chunked"
_LENGTH = b"Content-Length: %d" % len(HIDDEN)

AMBIGUOUS: dict[str, bytes] = {
    # Two lengths.
    "cl-te": _post(b"Content-Length: 5", _CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "te-cl": _post(_CHUNKED, b"Content-Length: 4", body=b"0\r\n\r\n" + HIDDEN),
    "te-te": _post(_CHUNKED, b"Transfer-Encoding: identity", body=b"0\r\n\r\n" + HIDDEN),
    "te-twice": _post(_CHUNKED, _CHUNKED, body=b"0\r\n\r\n" + HIDDEN),
    "te-list": _post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + HIDDEN),
    "te-unknown": _post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + HIDDEN),
    "te-quoted": _post(b'Transfer-Encoding: "chunked"', body=b"0\r\n\r\n" + HIDDEN),
    "te-vertical-tab": _post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n" + HIDDEN),
    "te-before-colon": _post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n" + HIDDEN),
    "te-folded": _post(b"Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n" + HIDDEN),
    "cl-cl": _post(b"Content-Length: 0", _LENGTH, body=HIDDEN),
    "cl-cl-equal": _post(b"Content-Length: 0", b"Content-Length: 0", body=HIDDEN),
    "cl-list": _post(b"Content-Length: 0, 0", body=HIDDEN),
    "cl-plus": _post(b"Content-Length: +0", body=HIDDEN),
    "cl-minus": _post(b"Content-Length: -1", body=HIDDEN),
    "cl-hex": _post(b"Content-Length: 0x0", body=HIDDEN),
    "cl-blank-inside": _post(b"Content-Length: 1 0", body=b"0123456789" + HIDDEN),
    "cl-huge": _post(b"Content-Length: 99999999999999999999", body=HIDDEN),
    "cl-empty": _post(b"Content-Length:", body=HIDDEN),
    "cl-before-colon": _post(b"Content-Length : 0", body=HIDDEN),
    # Line ends.
    "obs-fold": _post(b"X-A: b", b" Content-Length: 7", body=HIDDEN),
    "bare-cr-in-value": _post(b"X-A: b\rContent-Length: 7", body=HIDDEN),
    "nul-in-value": _post(b"X-A: \0", body=HIDDEN),
    "nul-in-name": _post(b"X\0A: b", body=HIDDEN),
    "no-colon": _post(b"nonsense", body=HIDDEN),
    "empty-name": _post(b": b", body=HIDDEN),
    "blank-in-name": _post(b"X A: b", body=HIDDEN),
    # Chunks.
    "chunk-size-sign": _post(_CHUNKED, body=b"-1\r\n" + HIDDEN),
    "chunk-size-plus": _post(_CHUNKED, body=b"+0\r\n\r\n" + HIDDEN),
    "chunk-size-0x": _post(_CHUNKED, body=b"0x0\r\n\r\n" + HIDDEN),
    "chunk-size-huge": _post(_CHUNKED, body=b"ffffffffffffffffff\r\n" + HIDDEN),
    "chunk-size-empty": _post(_CHUNKED, body=b"\r\n" + HIDDEN),
    "chunk-without-end": _post(_CHUNKED, body=b"3\r\nabcd\r\n0\r\n\r\n" + HIDDEN),
    "chunk-size-bare-cr": _post(_CHUNKED, body=b"0\r\r\n\r\n" + HIDDEN),
    "length-in-trailers": _post(_CHUNKED, body=b"3\r\nabc\r\n0\r\nContent-Length: 7\r\n\r\n" + HIDDEN),
    # The request line and the host.
    "no-host": b"POST /seen HTTP/1.1\r\n\r\n" + HIDDEN,
    "two-hosts": b"POST /seen HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + HIDDEN,
    "version-0.9": b"POST /seen HTTP/0.9\r\nHost: h\r\n\r\n" + HIDDEN,
    "version-1.2": b"POST /seen HTTP/1.2\r\nHost: h\r\n\r\n" + HIDDEN,
    "version-2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "version-missing": b"POST /seen\r\nHost: h\r\n\r\n" + HIDDEN,
    "version-lower-case": b"POST /seen http/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "method-unknown": b"P\0ST /seen HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "connect": b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n" + HIDDEN,
    "te-in-1.0": b"POST /seen HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "expect-strange": _post(b"Expect: 200-ok", b"Content-Length: 0", body=HIDDEN),
}

PLAIN: dict[str, bytes] = {
    "no-body": _post(),
    "length": _post(b"Content-Length: 3", body=b"abc"),
    "chunks": _post(_CHUNKED, body=b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"),
    "chunk-extension": _post(_CHUNKED, body=b"3;name=value\r\nabc\r\n0;x\r\n\r\n"),
    "chunk-leading-zeros": _post(_CHUNKED, body=b"0003\r\nabc\r\n000\r\n\r\n"),
    "trailers": _post(_CHUNKED, body=b"3\r\nabc\r\n0\r\nX-A: b\r\nHost: evil\r\n\r\n"),
    "upper-case-names": _post(b"CONTENT-LENGTH: 3", body=b"abc"),
    "blanks-around-value": _post(b"Content-Length:   3  ", body=b"abc"),
    "upgrade": _post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 3", body=b"abc"),
    "expect": _post(b"Expect: 100-continue", b"Content-Length: 3", body=b"abc"),
    "absolute-target": b"POST http://h/seen HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    "http-1.0": b"POST /seen HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc",
    "two": _post(b"Content-Length: 1", body=b"a") + _post(_CHUNKED, body=b"1\r\nb\r\n0\r\n\r\n"),
    "blank-lines-before": b"\r\n\r\n" + _post(b"Content-Length: 1", body=b"a"),
}
