"""The file of client keys: one line per key, with its hash and its limits, never the key itself.

::

    # name  hash                                          limits, all optional
    alice   sha256:9f86d081884c7d659a2feaa0c55ad015...   requests_per_minute=600 max_concurrent=8
    batch   sha256:60303ae22b998861bce3b28f33eec1be...   models=small,large

`disagg keys new` makes such a line.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from disagg.errors import ConfigError, Problem
from disagg.topology.messages import nearest

MAX_BYTES = 4 * 1024**2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_LIMITS = ("requests_per_minute", "max_concurrent", "models")


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One key that clients may use.

    Attributes:
        name: What logs and metrics call it.
        digest: SHA-256 of the key.
        requests_per_minute: How many requests it may begin; None for any number.
        max_concurrent: How many it may have open; None for any number.
        models: Models that it may use; None for all.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    models: frozenset[str] | None = None

    @property
    def line(self) -> str:
        """Its line in the file."""
        words = [self.name, f"sha256:{self.digest.hex()}"]
        if self.requests_per_minute is not None:
            words.append(f"requests_per_minute={self.requests_per_minute}")
        if self.max_concurrent is not None:
            words.append(f"max_concurrent={self.max_concurrent}")
        if self.models is not None:
            words.append(f"models={','.join(sorted(self.models))}")
        return " ".join(words)


def key_digest(key: bytes) -> bytes:
    """The hash that the file has in a key's place. Keys are random and long, so it needs neither salt nor rounds."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """A fresh key: 256 random bits behind a prefix by which leaked keys can be found."""
    return f"disagg-{secrets.token_urlsafe(32)}"


def make_entry(name: str, key: str, limits: Iterable[str], where: str) -> ClientKey:
    """The entry of a new key.

    Args:
        name: What logs and metrics call it.
        key: The key.
        limits: Words such as ``max_concurrent=8``, as the file has them.
        where: What problems name as their place.

    Raises:
        ConfigError: If the name or a limit cannot be used, with every problem.
    """
    problems: list[Problem] = []
    entry = _read_words([name, f"sha256:{key_digest(key.encode()).hex()}", *limits], where, problems)
    if entry is None or problems:
        raise ConfigError(problems)
    return entry


def read_key_file(path: str) -> tuple[ClientKey, ...]:
    """Read all keys.

    Raises:
        ConfigError: If the file cannot be read, has no key, or has lines that are wrong; with every problem.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError([Problem(path, f"cannot be read: {error.strerror}")]) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem(path, f"is larger than {MAX_BYTES // 1024**2} MiB")])
    return parse_keys(raw.decode("utf-8", "replace"), path)


def parse_keys(text: str, name: str) -> tuple[ClientKey, ...]:
    """Read the text of a key file.

    Args:
        text: Its lines.
        name: What problems call the file.

    Raises:
        ConfigError: With every problem.
    """
    problems: list[Problem] = []
    entries: list[ClientKey] = []
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}:{number}"
        entry = _read_words(words, where, problems)
        if entry is None:
            continue
        for seen, what, told in ((names, entry.name, "name"), (digests, entry.digest, "key")):
            if what in seen:
                problems.append(Problem(where, f"has the same {told} as line {seen[what]}"))  # type: ignore[index]
            seen[what] = number  # type: ignore[index]
        entries.append(entry)
    if not entries and not problems:
        problems.append(Problem(name, "has no key; `disagg keys new --name NAME` makes a line for it"))
    if problems:
        raise ConfigError(problems)
    return tuple(entries)


def _read_words(words: list[str], where: str, problems: list[Problem]) -> ClientKey | None:
    name, *rest = words
    if not _NAME.fullmatch(name):
        problems.append(Problem(where, f"{name[:40]!r} is no name; it has up to 64 letters, digits, dots and dashes"))
        return None
    found = _HASH.fullmatch(rest[0]) if rest else None
    if found is None:
        # The word is not shown: it may be a key that somebody pasted in place of its hash.
        problems.append(Problem(where, f"{name}: the second word is not sha256: and 64 lower-case hex digits"))
        return None
    entry = ClientKey(name, bytes.fromhex(found[1]))
    for word in rest[1:]:
        entry = _with_limit(entry, word, where, problems)
    return entry


def _with_limit(entry: ClientKey, word: str, where: str, problems: list[Problem]) -> ClientKey:
    limit, _, value = word.partition("=")
    if limit not in _LIMITS:
        guess = nearest(limit, _LIMITS)
        near = f"did you mean {guess}?" if guess else f"known are {', '.join(_LIMITS)}"
        problems.append(Problem(where, f"{entry.name}: unknown limit {limit[:40]!r}; {near}"))
        return entry
    if limit == "models":
        models = frozenset(filter(None, value.split(",")))
        if models:
            return replace(entry, models=models)
        problems.append(Problem(where, f"{entry.name}: models= needs names, separated by commas"))
        return entry
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
        problems.append(Problem(where, f"{entry.name}: {limit}= needs a whole number from 1 to 9999999"))
        return entry
    number = int(value)
    if limit == "max_concurrent":
        return replace(entry, max_concurrent=number)
    return replace(entry, requests_per_minute=number)
