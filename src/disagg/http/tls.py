"""TLS on both sides: what the endpoint shows its clients, and how engines behind https:// are checked."""

from __future__ import annotations

import ssl
from functools import cache

from disagg.errors import PreparationError


def server_tls(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 and later.

    Args:
        certfile: PEM file with the certificate, and those that lead to its root.
        keyfile: PEM file with its key; None if that is in the same file.

    Raises:
        PreparationError: If a file is missing, is not PEM, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, path in (("router.ssl_certfile", certfile), ("router.ssl_keyfile", keyfile)):
        if path is not None:
            _check_readable(field, path)
    try:
        # A key with a passphrase would make OpenSSL ask on the terminal, in the middle of a start.
        context.load_cert_chain(certfile, keyfile, password=_no_passphrase)
    except ssl.SSLError as error:
        raise PreparationError(
            f"router.ssl_certfile {certfile} and its key in {keyfile or 'the same file'} cannot be used:"
            f" {error.reason or error}.",
            hint="Both have to be PEM files, and the key has to be the certificate's own.",
        ) from error
    except ValueError as error:
        raise PreparationError(
            f"The key in {keyfile or certfile} (router.ssl_keyfile) has a passphrase.",
            hint="Remove it, for example with: openssl pkey -in KEY -out NEWKEY",
        ) from error
    return context


@cache
def client_tls() -> ssl.SSLContext:
    """How engines behind https:// are checked: against the system's authorities, or those in `SSL_CERT_FILE`."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _check_readable(field: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise PreparationError(f"{field} {path} cannot be read: {error.strerror}.") from error


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
