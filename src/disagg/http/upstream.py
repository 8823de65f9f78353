"""One connection to an engine, and the answer that arrives on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Protocol, cast

import httptools

from disagg.errors import UpstreamError, UpstreamProtocolError, UpstreamTimeoutError, UpstreamUnreachableError
from disagg.http.limits import ClientLimits, LegTimes
from disagg.http.messages import Header, find_header
from disagg.http.sweeper import Sweeper

# Body bytes that wait for a reader before the engine is no longer read.
_MAX_BUFFERED = 256 * 1024


class Authority(Protocol):
    """The part of an origin that messages name."""

    @property
    def authority(self) -> str:
        """``host:port``."""
        ...


class UpstreamConnection[OriginT: Authority](asyncio.Protocol):
    pass
