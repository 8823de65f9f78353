"""Finding an entry by what users call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from disagg.errors import ConfigError, Problem


def key(name: str) -> str:
    """The form in which names are compared: small letters, hyphens for blanks and underscores."""
    return "-".join(name.strip().lower().replace("_", "-").split())


def unknown(kind: str, name: str, names: Iterable[str], advice: str) -> ConfigError:
    """The error for a name that is not in the catalogue.

    Args:
        kind: What was looked for; the flag is called the same.
        name: What was asked for.
        names: What there is, aliases included.
        advice: How to go on without an entry.
    """
    near = get_close_matches(key(name), sorted({key(n) for n in names}), n=3, cutoff=0.5)
    meant = f"Near it: {', '.join(near)}. " if near else ""
    return ConfigError([Problem(f"--{kind} {name}", f"is not in the catalogue. {meant}{advice}")])


def index(entries: Mapping[str, Iterable[str]]) -> Mapping[str, str]:
    """Entry by every name that finds it.

    Args:
        entries: All names of each entry, its own included.

    Raises:
        ValueError: If two entries claim one name.
    """
    found: dict[str, str] = {}
    for entry, names in entries.items():
        for name in (entry, *names):
            if found.setdefault(key(name), entry) != entry:
                raise ValueError(f"{name!r} names both {found[key(name)]} and {entry}")
    return found
