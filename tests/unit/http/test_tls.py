"""TLS on both sides, with certificates made for the test."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from disagg.errors import PreparationError, UpstreamUnreachableError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import Request, json_answer
from disagg.http.origin import Origin, Outgoing
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.http.tls import client_tls, server_tls

TIMES = LegTimes(5.0, 5.0, 5.0)


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    certfile, keyfile = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(keyfile), "-out", str(certfile), "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return str(certfile), str(keyfile)


async def _hello(request: Request, respond: Responder) -> None:
    respond.send_answer(json_answer(200, {"path": request.path}))


async def test_a_client_trusts_only_who_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine behind https:// is asked if its authority is trusted, and refused with a reason if it is not."""
    certfile, keyfile = make_certificate(tmp_path, "engine")
    server = Server(_hello)
    await server.start("127.0.0.1", 0, tls=server_tls(certfile, keyfile))
    origin = Origin.parse(f"https://127.0.0.1:{server.port}")
    try:
        client_tls.cache_clear()
        stranger = Client()
        with pytest.raises(UpstreamUnreachableError, match=r"certificate.*SSL_CERT_FILE"):
            await stranger.request(origin, Outgoing("GET", "/x"), TIMES)
        await stranger.close()
        client_tls.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", certfile)
        client = Client()
        for _ in range(2):
            response = await client.request(origin, Outgoing("GET", "/x"), TIMES)
            assert (response.status, await response.read()) == (200, b'{"path":"/x"}')
        assert client.open_connections == 1  # kept for the second request
        await client.close()
    finally:
        client_tls.cache_clear()
        await server.stop()


async def test_old_protocols_and_plain_text_get_nothing(tmp_path: Path) -> None:
    """A client that offers less than TLS 1.2, or speaks plain HTTP, is not served, and others are."""
    certfile, keyfile = make_certificate(tmp_path, "server")
    server = Server(_hello)
    await server.start("127.0.0.1", 0, tls=server_tls(certfile, keyfile))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/1.1" not in await reader.read()
        writer.close()
        context = ssl.create_default_context(cafile=certfile)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() in {"TLSv1.2", "TLSv1.3"}
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    finally:
        await server.stop()
    assert server_tls(certfile, keyfile).minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_key_in_the_same_file_is_found(tmp_path: Path) -> None:
    """One PEM file with certificate and key is enough."""
    certfile, keyfile = make_certificate(tmp_path, "a")
    both = tmp_path / "both.pem"
    both.write_text(Path(certfile).read_text() + Path(keyfile).read_text())
    server_tls(str(both), None)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """A missing, mismatched or encrypted file is told at the start, by its setting and path."""
    (certfile, keyfile), (_, other) = (make_certificate(tmp_path, name) for name in ("a", "b"))
    with pytest.raises(PreparationError, match=r"router\.ssl_certfile /nowhere\.pem cannot be read"):
        server_tls("/nowhere.pem", None)
    with pytest.raises(PreparationError, match=r"router\.ssl_keyfile /nowhere\.key cannot be read"):
        server_tls(certfile, "/nowhere.key")
    for wrong in (other, None):
        with pytest.raises(PreparationError, match=r"router\.ssl_certfile .*own"):
            server_tls(certfile, wrong)
    locked = str(tmp_path / "locked.key")
    subprocess.run(
        ["openssl", "ec", "-in", keyfile, "-aes256", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(PreparationError, match="passphrase"):
        server_tls(certfile, locked)
