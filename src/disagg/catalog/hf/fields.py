"""Fields of a configuration file, read with every problem collected instead of the first one raised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disagg.errors import Problem


class Fields:
    """One level of a configuration.

    A field that is null counts as missing, as it does for the libraries that write these files. A required field that
    is missing or of the wrong kind is noted as a problem and read as 1, so that reading goes on to find the others.

    Args:
        data: The level.
        where: What a problem is reported for: the file.
        path: Names of the levels above, with a dot at the end.
        problems: Where problems go; shared by all levels of a file.
    """

    def __init__(
        self, data: Mapping[str, object], where: str, path: str = "", problems: dict[Problem, None] | None = None
    ) -> None:
        self._data = data
        self._where = where
        self._path = path
        # A dict keeps the order and drops repetitions: a field is often read once per layer.
        self._problems: dict[Problem, None] = {} if problems is None else problems

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was wrong so far, in this level and all that belong to the same file."""
        return tuple(self._problems)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that are there and not null."""
        return tuple(name for name, value in self._data.items() if value is not None)

    def problem(self, name: str, message: str) -> None:
        """Note that a field is wrong."""
        self._problems[Problem(f"{self._where}: {self._path}{name}", message)] = None

    def has(self, *names: str) -> bool:
        """Whether one of the fields is there and not null."""
        return any(self._data.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number: the first of the names that is there.

        Args:
            names: The field, and what other models call it.
            default: What it is where it is missing; None makes it required.
            least: Smallest value that makes sense.
        """
        value = self.maybe(*names, least=least)
        if value is not None:
            return value
        if default is not None:
            return default
        if not self.has(*names):
            others = f" (also known as {', '.join(names[1:])})" if len(names) > 1 else ""
            self.problem(names[0], f"is missing{others}; give it as a whole number")
        return 1

    def maybe(self, *names: str, least: int = 0) -> int | None:
        """A whole number that may be missing."""
        for name in names:
            value = self._data.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self.problem(name, f"is {_shown(value)}; it must be a whole number of at least {least}")
                return None
            return value
        return None

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self._data.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.problem(name, f"is {_shown(value)}; it must be a number above zero")
            return default
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        for name in names:
            value = self._data.get(name)
            if isinstance(value, bool):
                return value
            if value is not None:
                self.problem(name, f"is {_shown(value)}; it must be true or false")
        return default

    def text(self, *names: str, default: str = "") -> str:
        """A word; the default also where the field is something else."""
        for name in names:
            value = self._data.get(name)
            if isinstance(value, str):
                return value
        return default

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of words; empty if it is missing."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(name, f"is {_shown(value)}; it must be a list of words")
            return ()
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None if the field is missing or not a list."""
        value = self._data.get(name)
        if not isinstance(value, list):
            return None
        if not all(isinstance(item, int) and item >= 0 for item in value):
            self.problem(name, "must be a list of whole numbers")
            return None
        return tuple(int(item) for item in value)

    def section(self, name: str) -> Fields | None:
        """A level below; None if it is missing."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problem(name, f"is {_shown(value)}; it must be an object with fields of its own")
            return None
        return Fields(value, self._where, f"{self._path}{name}.", self._problems)

    def filled(self, defaults: Mapping[str, object]) -> Fields:
        """The same level, with defaults for fields that are not there at all (null is an answer)."""
        return Fields({**defaults, **self._data}, self._where, self._path, self._problems)

    def absent(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are not there at all."""
        return tuple(name for name in names if name not in self._data)

    def sections(self, name: str) -> tuple[Fields, ...]:
        """The levels of a list of objects; empty if it is missing."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.problem(name, "must be a list of objects")
            return ()
        return tuple(
            Fields(item, self._where, f"{self._path}{name}[{i}].", self._problems) for i, item in enumerate(value)
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
