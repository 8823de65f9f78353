"""When an engine that answers, or does not, gets requests: hysteresis, where busy is not dead.

::

    new --good--> up --missed x failures--> away --good x successes--> up
                   |--refused------------->  gone --good x successes--> up   (at once if it is a new process)

Nothing here ends requests that an engine has: one that does not answer may be busy, and one that takes no new
connections may be finishing what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Finding(StrEnum):
    """What one question about an engine's health has shown."""

    GOOD = "good"
    """It answers: 200, or a status that says it is there but does not talk to us about it (401, 403)."""
    BAD = "bad"
    """It answers that it is not well."""
    SILENT = "silent"
    """No answer in time, and no sign of work either."""
    BUSY = "busy"
    """No answer in time, but it went on with requests meanwhile."""
    REFUSED = "refused"
    """Nothing listens there."""


class Condition(StrEnum):
    """What an engine is taken for."""

    NEW = "new"
    UP = "up"
    AWAY = "away"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class HealthRules:
    """How much it takes to change one's mind.

    Attributes:
        failures: Bad or missing answers in a row after which an engine gets no requests.
        successes: Good answers in a row before it gets requests again.
    """

    failures: int
    successes: int


class Health:
    """What is known about one engine.

    Attributes:
        condition: What it is taken for.
    """

    __slots__ = ("_bad", "_good", "condition")

    def __init__(self) -> None:
        self.condition = Condition.NEW
        self._good = 0
        self._bad = 0

    def restarted(self) -> None:
        """It is another process now, of which nothing bad is known."""
        self.condition = Condition.NEW
        self._good = self._bad = 0

    def feed(self, finding: Finding, rules: HealthRules) -> bool:
        """Take a finding in.

        Returns:
            Whether the condition has changed.
        """
        before = self.condition
        match finding:
            case Finding.GOOD:
                self._bad = 0
                self._good += 1
                # A first good answer is all that is known of a new engine; one that came back has to last.
                if self.condition is Condition.NEW or self._good >= rules.successes:
                    self.condition = Condition.UP
            case Finding.BUSY:
                # Says nothing about its health, so it neither counts nor breaks a row.
                pass
            case Finding.REFUSED:
                self._good = 0
                self._bad += 1
                if self.condition is not Condition.NEW:
                    self.condition = Condition.GONE
            case Finding.BAD | Finding.SILENT:
                self._good = 0
                self._bad += 1
                if self.condition is Condition.UP and self._bad >= rules.failures:
                    self.condition = Condition.AWAY
        return self.condition is not before
