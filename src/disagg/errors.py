"""The error tree. Every failure that a user can meet is one of these.

::

    DisaggError                         status  exit
    ├── ConfigError                        400     2   flags or files are wrong; lists every problem at once
    ├── ClientError                                    what the caller sent cannot be served
    │   ├── BadRequestError                400     2
    │   ├── UnauthorizedError              401     2
    │   ├── UnknownModelError              404     2
    │   ├── UnknownPathError               404     2
    │   ├── MethodNotAllowedError          405     2
    │   ├── RequestTimeoutError            408     2   the request arrived too slowly
    │   ├── PayloadTooLargeError           413     2
    │   ├── HeadersTooLargeError           431     2
    │   └── NotDisaggregableError          501     2   the API exists, but cannot be split over stages
    ├── CapacityError                                  nothing is wrong, but not now
    │   ├── NoInstanceError                503     1   a stage that is needed has no ready instance
    │   ├── QueueTimeoutError              503     1   it waited as long as it may, and was not begun
    │   └── OverloadedError                429     1
    ├── UpstreamError                                  an engine failed
    │   ├── UpstreamUnreachableError       502     1
    │   ├── UpstreamProtocolError          502     1   the engine's answer makes no sense
    │   ├── HandoffError                   502     1   prefill gave no handle that decode could use
    │   └── UpstreamTimeoutError           504     1
    └── LaunchError                        500     1   a deployment could not start or go on
        ├── PreparationError               500     1   something that it needs is missing (model, package, device)
        └── InstanceDiedError              500     1

An error is turned into an HTTP answer in one place (`router`) and into an exit code in one place (`cli.main`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class DisaggError(Exception):
    """Base of all errors that are meant for a user.

    Args:
        message: What is wrong, naming the flag, field, file or instance.
        hint: What to do about it, a sentence of its own.
    """

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "InternalServerError"
    retry_safe: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration.

    Attributes:
        where: The flag, environment variable or `file:line: path` that caused it.
        message: What is wrong with it, and what would be right.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class ConfigError(DisaggError):
    """Flags or a topology file are wrong. Carries every problem, not the first."""

    status = 400
    exit_code = 2
    kind = "ConfigError"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {p}" for p in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the configuration:\n{lines}")


class ClientError(DisaggError):
    """What the caller sent cannot be served."""

    status = 400
    exit_code = 2
    kind = "BadRequestError"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class BadRequestError(ClientError):
    """The request is malformed."""


class UnauthorizedError(ClientError):
    """No key, or a wrong one."""

    status = 401
    kind = "AuthenticationError"


class UnknownModelError(ClientError):
    """The request names a model that is not served here."""

    status = 404
    kind = "NotFoundError"


class UnknownPathError(ClientError):
    """No such endpoint."""

    status = 404
    kind = "NotFoundError"


class MethodNotAllowedError(ClientError):
    """The endpoint exists, with another method."""

    status = 405
    kind = "MethodNotAllowedError"


class RequestTimeoutError(ClientError):
    """The client sent its request too slowly."""

    status = 408
    kind = "RequestTimeoutError"


class PayloadTooLargeError(ClientError):
    """The body is over the limit."""

    status = 413
    kind = "PayloadTooLargeError"


class HeadersTooLargeError(ClientError):
    """The header block is over the limit."""

    status = 431
    kind = "HeadersTooLargeError"


class NotDisaggregableError(ClientError):
    """A known API that has no meaning over separate stages."""

    status = 501
    kind = "NotImplementedError"


class CapacityError(DisaggError):
    """Nothing is wrong with the request, but it cannot be served now.

    Args:
        message: What is short.
        hint: What to do about it.
        retry_after_s: When to come back, in whole seconds.
    """

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class NoInstanceError(CapacityError):
    """A stage that the request needs has no ready instance."""


class QueueTimeoutError(CapacityError):
    """The request waited in the queue for as long as it may."""


class OverloadedError(CapacityError):
    """A limit of ours is reached; the request was refused at once."""

    status = 429
    kind = "RateLimitError"


class UpstreamError(DisaggError):
    """An engine failed before the client had a byte of the answer."""

    status = 502
    kind = "BadGatewayError"
    retry_safe = True


class UpstreamUnreachableError(UpstreamError):
    """The engine refused, reset or closed the connection."""


class UpstreamProtocolError(UpstreamError):
    """The engine answered something that is not HTTP, not JSON, or not what was asked for."""


class HandoffError(UpstreamError):
    """Prefill returned no handle, or one that must not reach a decode engine."""


class UpstreamTimeoutError(UpstreamError):
    """The engine did not answer in time."""

    status = 504
    kind = "GatewayTimeoutError"


class LaunchError(DisaggError):
    """A deployment could not start, or cannot go on."""

    kind = "LaunchError"


class PreparationError(LaunchError):
    """Something that an instance needs is missing: a model, a package, a device."""


class InstanceDiedError(LaunchError):
    """An engine process ended while it was needed."""
