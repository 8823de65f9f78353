"""Who may use the endpoint: client keys, their limits, and the key that the engines want."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from disagg.errors import ConfigError, OverloadedError, Problem, UnauthorizedError, UnknownModelError
from disagg.http.messages import Header, Request
from disagg.policy.admission import Allowance
from disagg.router.key_file import ClientKey, key_digest, read_key_file
from disagg.router.record import Record
from disagg.topology.router_spec import Router as RouterSpec

log = logging.getLogger("disagg.router.keys")

KEY_VARIABLE = "DISAGG_API_KEY"
"""Environment variable with client keys, separated by commas."""
ADMIN_KEY_VARIABLE = "DISAGG_ADMIN_KEY"
"""Environment variable with the admin API's key."""


class Holder:
    """What one key has in use."""

    __slots__ = ("allowance", "key", "open")

    def __init__(self, key: ClientKey, now_s: float) -> None:
        self.key = key
        self.open = 0
        self.allowance = self._fresh(now_s)

    def change(self, key: ClientKey, now_s: float) -> None:
        """The file has other limits for this key now; what is open stays counted."""
        if key.requests_per_minute != self.key.requests_per_minute:
            self.key = key
            self.allowance = self._fresh(now_s)
        self.key = key

    def check_model(self, model: str) -> None:
        """Whether this key may use a model.

        Raises:
            UnknownModelError: If not: for this key there is no such model.
        """
        models = self.key.models
        if models is not None and model not in models:
            raise UnknownModelError(f"The model `{model}` does not exist for the key {self.key.name}.", param="model")

    def _fresh(self, now_s: float) -> Allowance | None:
        per_minute = self.key.requests_per_minute
        return None if per_minute is None else Allowance(per_minute, now_s)


class Keys:
    """The keys of clients.

    Args:
        plain: Keys given as such.
        path: A key file, read again when it changes.
        now: Monotonic seconds.

    Attributes:
        path: The same file.

    Raises:
        ConfigError: If the file is wrong.
    """

    def __init__(self, plain: Sequence[str], path: str | None, now: Callable[[], float]) -> None:
        self._now = now
        self.path = path
        self._plain = [ClientKey(f"key-{n}", key_digest(key.encode())) for n, key in enumerate(plain, 1)]
        # Looked up by a keyed hash of the digest: how long that takes tells a guesser nothing about the digests here.
        self._seal = os.urandom(32)
        self._holders: dict[bytes, Holder] = {}
        self._seen = _stamp(path)
        self._take(read_key_file(path) if path is not None else ())

    def reload(self) -> bool:
        """Read the file again if it has changed. One that is wrong is reported, and the keys stay as they are.

        Returns:
            Whether other keys are in force now.
        """
        if self.path is None or (stamp := _stamp(self.path)) == self._seen:
            return False
        self._seen = stamp
        try:
            self._take(read_key_file(self.path))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
            return False
        log.warning("%s: %d keys are in force", self.path, len(self._holders) - len(self._plain))
        return True

    async def watch(self, every_s: float = 1.0) -> None:
        """Look after the file, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.reload()

    def check(self, request: Request) -> Holder:
        """Whose request this is.

        Raises:
            UnauthorizedError: If it has no key, or one that is not known.
        """
        value = request.header(b"authorization")
        if value is None:
            raise UnauthorizedError("This endpoint needs a key.", hint="Send it as `Authorization: Bearer KEY`.")
        scheme, _, key = value.partition(b" ")
        if scheme.lower() == b"bearer":
            digest = key_digest(key.strip())
            holder = self._holders.get(self._sealed(digest))
            if holder is not None and hmac.compare_digest(holder.key.digest, digest):
                return holder
        raise UnauthorizedError("The key is not known here.", hint="Send it as `Authorization: Bearer KEY`.")

    def admit(self, request: Request, record: Record) -> Holder:
        """Begin a request; whoever ends it takes one off the holder's `open`.

        Args:
            request: With a key.
            record: Gets the key's name.

        Raises:
            UnauthorizedError: If it has no key, or one that is not known.
            OverloadedError: If the key has used up what it may. Nothing was begun then.
        """
        holder = self.check(request)
        key = holder.key
        record.key = key.name
        if key.max_concurrent is not None and holder.open >= key.max_concurrent:
            raise OverloadedError(
                f"The key {key.name} has {holder.open} requests open, which is its limit.",
                hint="Wait for one to end.",
            )
        wait_s = holder.allowance.take(self._now()) if holder.allowance is not None else 0
        if wait_s:
            raise OverloadedError(
                f"The key {key.name} may begin {key.requests_per_minute} requests per minute, and has.",
                retry_after_s=wait_s,
            )
        holder.open += 1
        return holder

    def _take(self, entries: Sequence[ClientKey]) -> None:
        old, now_s = self._holders, self._now()
        self._holders = {}
        for entry in (*self._plain, *entries):
            sealed = self._sealed(entry.digest)
            holder = old.get(sealed)
            if holder is None:
                holder = Holder(entry, now_s)
            else:
                holder.change(entry, now_s)
            self._holders[sealed] = holder

    def _sealed(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._seal, digest_size=16).digest()


def client_keys(spec: RouterSpec, now: Callable[[], float]) -> Keys | None:
    """The keys that clients need, None if they need none.

    Raises:
        ConfigError: If the key file is wrong.
    """
    plain = spec.api_key or tuple(filter(None, (k.strip() for k in os.environ.get(KEY_VARIABLE, "").split(","))))
    if not plain and spec.api_key_file is None:
        return None
    return Keys(plain, spec.api_key_file, now)


def engine_credentials(spec: RouterSpec) -> tuple[Header, ...]:
    """The header that the engines want, if they want one.

    Raises:
        ConfigError: If the file cannot be read or has no key.
    """
    if spec.engine_api_key_file is None:
        return ()
    key = _first_line(spec.engine_api_key_file, "router.engine_api_key_file")
    return ((b"authorization", b"Bearer " + key.encode("latin-1")),)


def admin_key(spec: RouterSpec) -> bytes:
    """The admin API's key, as its digest.

    Raises:
        ConfigError: If there is none: whoever can reach that API can empty the fleet.
    """
    if spec.admin_key_file is not None:
        return key_digest(_first_line(spec.admin_key_file, "router.admin_key_file").encode())
    key = os.environ.get(ADMIN_KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(
            [
                Problem(
                    "router.admin_port",
                    f"the admin API needs a key of its own: give router.admin_key_file, or set {ADMIN_KEY_VARIABLE}",
                )
            ]
        )
    return key_digest(key.encode())


def key_problems(spec: RouterSpec) -> list[Problem]:
    """Everything that is wrong with the files that hold keys, so that it is told beside what else is wrong."""
    reads: list[Callable[[], object]] = [lambda: engine_credentials(spec)]
    if spec.api_key_file is not None:
        path = spec.api_key_file
        reads.append(lambda: read_key_file(path))
    if spec.admin_port is not None:
        reads.append(lambda: admin_key(spec))
    problems: list[Problem] = []
    for read in reads:
        try:
            read()
        except ConfigError as error:
            problems.extend(error.problems)
    return problems


def _first_line(path: str, where: str) -> str:
    try:
        text = Path(path).read_text(encoding="latin-1")
    except OSError as error:
        raise ConfigError([Problem(where, f"{path} cannot be read: {error.strerror}")]) from error
    line = text.partition("\n")[0].strip()
    if not line or not line.isprintable():
        raise ConfigError([Problem(where, f"{path}: the first line has to be the key")])
    return line


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    """What changes when a file does, also when another one is renamed into its place."""
    if path is None:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)
