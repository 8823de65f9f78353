"""The story of one request, as headers, metrics and the access log tell it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from disagg.errors import DisaggError
from disagg.http.messages import Header


class Path(StrEnum):
    """Which way a request took."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    COLOCATED = "colocated"
    PASSED = "passed"
    """To one instance, because the API has nothing to hand over."""
    NONE = "none"


class Outcome(StrEnum):
    """How a request ended, for the client."""

    OK = "ok"
    REFUSED = "refused"
    """An answer of 4xx, ours or an engine's."""
    FAILED = "failed"
    """An answer of 5xx."""
    BROKEN = "broken"
    """The answer had begun, and ended with an error event."""
    CLIENT_LEFT = "client_left"


def error_slug(error: DisaggError) -> str:
    """A word of a closed list for an error: ``UnknownModelError`` is ``unknown-model``."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


@dataclass(slots=True)
class Record:
    """What is known about one request so far.

    Attributes:
        public_id: The id that the client sees.
        api: The path that it called.
        started_at: Monotonic seconds.
        path: The way that it takes.
        reason: Why the way is not the disaggregated one; empty otherwise.
        primed: Why the KV was handed over by a leg of its own, before the one that answers; empty if it was not.
        error: Why the request was not served, a word of a closed list; empty otherwise.
        prefill: Instance of the prefill leg whose KV was used, or tried last.
        decode: Instance of the decode leg, or of the only leg.
        status: Status sent to the client; 0 before that.
        outcome: How it ended.
        first_byte_at: When the client was sent the first byte of a body, monotonic seconds; 0 before that.
        retries: How often it was tried again.
        prompt_tokens: Length of the prompt, as far as an engine has told it.
        cached_tokens: How many of them prefill had in its own cache.
        completion_tokens: Length of the answer, as far as an engine has told it.
        queue_s: How long it waited for a permit, in seconds.
        prefill_s: How long the last prefill leg took, in seconds.
        trace_id: Of its trace, if there is one.
        bytes_sent: Length of the answer's body, without its framing.
        detail: For the log: what went wrong.
        key: Name of the client's key; empty if the router asks for none.
    """

    public_id: bytes
    api: str
    started_at: float
    path: Path = Path.NONE
    reason: str = ""
    primed: str = ""
    error: str = ""
    prefill: str = ""
    decode: str = ""
    status: int = 0
    outcome: Outcome = Outcome.OK
    first_byte_at: float = 0.0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    bytes_sent: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    trace_id: str = ""
    detail: str = ""
    key: str = ""

    def fail(self, status: int, error: str, detail: str = "") -> None:
        """It is not served: `error` is a word of a closed list, `detail` is for the log."""
        self.status = status
        self.outcome = Outcome.REFUSED if status < 500 else Outcome.FAILED
        self.error = self.error or error
        self.detail = self.detail or detail

    def headers(self) -> list[Header]:
        """Response headers that tell the client which way its request took."""
        lines = [(b"x-request-id", self.public_id)]
        if self.path is not Path.NONE:
            text = f"{self.path};reason={self.reason}" if self.reason else str(self.path)
            if self.primed:
                text += f";primed={self.primed}"
            lines.append((b"x-disagg-path", text.encode("latin-1")))
        if self.prefill:
            lines.append((b"x-disagg-prefill", self.prefill.encode("latin-1")))
        if self.decode:
            lines.append((b"x-disagg-decode", self.decode.encode("latin-1")))
        return lines

    def log_line(self, now: float) -> str:
        """One line of ``key=value`` pairs; nothing of the request's content and no credentials."""
        ttft = f"{self.first_byte_at - self.started_at:.4f}" if self.first_byte_at else "-"
        reason = f" reason={self.reason}" if self.reason else ""
        primed = f" primed={self.primed}" if self.primed else ""
        key = f" key={self.key}" if self.key else ""
        detail = f" detail={self.detail!r}" if self.detail else ""
        return (
            f"id={self.public_id.decode('latin-1')} api={self.api} path={self.path}{reason}{primed}"
            f" prefill={self.prefill or '-'} decode={self.decode or '-'} status={self.status}"
            f" outcome={self.outcome} ttft_s={ttft} duration_s={now - self.started_at:.4f}"
            f" retries={self.retries}{key}{detail}"
        )
