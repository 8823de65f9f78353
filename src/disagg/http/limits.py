"""Sizes and times that bound a connection."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one client connection may cost.

    Attributes:
        max_header_bytes: Request line and headers; more is refused with 431.
        max_headers: Number of header lines; more is refused with 431.
        max_body_bytes: Body without transfer coding; more is refused with 413.
        head_timeout_s: From the first byte of a request to the end of its headers.
        body_timeout_s: From the end of the headers to the end of the body.
        idle_timeout_s: How long a kept connection may wait for its next request.
        write_stall_s: How long a client may leave bytes unread before it counts as gone.
        tick_s: How late a limit may be noticed.
    """

    max_header_bytes: int = 64 * 1024
    max_headers: int = 128
    max_body_bytes: int = 64 * 1024**2
    head_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    idle_timeout_s: float = 75.0
    write_stall_s: float = 120.0
    tick_s: float = 0.1


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How the pool of connections to the engines behaves.

    Attributes:
        connect_timeout_s: Time to open a connection.
        idle_limit_s: How long an unused connection is kept. Has to be shorter than the server's own limit
            (5 s for vLLM), or requests meet connections that are being closed.
        max_idle: Unused connections kept per origin.
        max_header_bytes: Status line and headers of an answer; more is an error.
        tick_s: How late a limit may be noticed.
    """

    connect_timeout_s: float = 5.0
    idle_limit_s: float = 4.0
    max_idle: int = 512
    max_header_bytes: int = 64 * 1024
    tick_s: float = 0.1


class LegTimes(msgspec.Struct, frozen=True):
    """Times of one exchange, in seconds.

    Attributes:
        first_byte_s: From sending the request to the first byte of the answer's body.
        idle_s: The longest silence after that.
        total_s: From sending the request to the last byte.
    """

    first_byte_s: float
    idle_s: float
    total_s: float
