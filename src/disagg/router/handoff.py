"""KV that a prefill instance holds for a request, and whether it may still be used.

A handle is used once. One that is older than half of the lease, or whose prefill incarnation is gone, is dropped:
decode would read blocks that belong to another prompt by now, and would not notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engines.base import Handle, Transfer
from disagg.router.fleet import Member


@dataclass(slots=True)
class Handoff:
    """A handle and what it depends on. It counts as pinned on its member from `pin` to `unpin`.

    Attributes:
        handle: From the prefill engine.
        transfer: The attempt that made it.
        member: The incarnation that holds the KV.
        since: When prefill answered, monotonic seconds.
        took_s: How long prefill took, in seconds.
        answer: Prefill's whole answer, if it is needed for the client's.
        used: A decode leg has been sent with it.
        pinned: It is counted on its member.
    """

    handle: Handle
    transfer: Transfer
    member: Member
    since: float
    took_s: float = 0.0
    answer: bytes = b""
    used: bool = False
    pinned: bool = False

    def pin(self) -> None:
        """The member holds KV for it."""
        self.pinned = True
        self.member.pin()

    def fetched(self) -> None:
        """Decode has read the KV, and prefill may forget it."""
        self.used = True
        self.unpin(None)

    def unpin(self, lease_ends_s: float | None) -> None:
        """The KV has been fetched (None), or is held until this monotonic time at most. Further calls do nothing."""
        if self.pinned:
            self.pinned = False
            self.member.unpin(lease_ends_s)


def seems_replaced(handle: Handle, member: Member) -> bool:
    """Whether an engine that nobody has told us the id of names itself otherwise than before."""
    # A data-parallel engine adds its rank to its id.
    name = handle.engine_id.partition("_dp")[0]
    seen, member.engine_seen = member.engine_seen, name or member.engine_seen
    return bool(seen and name and seen != name and not member.peer.engine_id)


def is_of(handle: Handle, member: Member) -> bool:
    """Whether a handle comes from this incarnation, as far as its engine's id is known."""
    known = member.peer.engine_id
    # A data-parallel engine adds its rank to the id that it was given.
    return (
        not known or not handle.engine_id or handle.engine_id == known or handle.engine_id.startswith(f"{known}_dp")
    )
