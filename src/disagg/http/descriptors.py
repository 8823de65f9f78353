"""File descriptors: each open request costs two, one to its client and one to an engine."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("disagg.http")

# Log files, listeners, kept connections of others, and what libraries have open.
_SPARE = 256


def raise_descriptor_limit(requests: int) -> int:
    """Raise this process's limit as far as it may, and say so if that is not enough for so many open requests.

    Returns:
        How many requests can be open at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return requests
    possible = max(0, hard - _SPARE) // 2
    if possible < requests:
        log.info(
            "%d file descriptors are allowed, enough for %d requests at once; router.max_in_flight is %d. "
            "`ulimit -Hn` raises it, or more router.workers do",
            hard,
            possible,
            requests,
        )
    return possible
