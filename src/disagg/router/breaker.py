"""The breakers of a fleet: which results of legs count against which instance, and who is left out for it.

=====================================================  =====================================================
a leg ...                                              counts
=====================================================  =====================================================
was served, or its stream has begun                    for the instance, and for the prefill whose KV it used
is refused with 4xx, is cancelled, its client left     for nobody
cannot connect, breaks, answers nonsense               against the instance
hands over nothing that decode could use               against the prefill instance
carries KV, and answers 5xx or nothing in time         against both: decode cannot tell whose fault it is
answers 5xx or nothing in time otherwise               against the instance
=====================================================  =====================================================

A prefill leg that went well proves nothing yet: it is booked when decode has used its KV. An incarnation that is
replaced takes its breaker with it. Breakers live on the members that have failed; all others cost one look.
"""

from __future__ import annotations

import logging

from disagg.policy.base import Snapshot
from disagg.policy.breaker import Breaker, BreakerRules
from disagg.router.fleet import Fleet, Member
from disagg.router.metrics import Metrics
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router")


class Breakers:
    """Keeps instances that fail out of the choice.

    Args:
        rules: When one is left out, and for how long.
        fleet: Its members are held and let go.
        metrics: Where openings are counted.
    """

    def __init__(self, rules: BreakerRules, fleet: Fleet, metrics: Metrics) -> None:
        self._rules = rules
        self._fleet = fleet
        self._metrics = metrics
        self._tripped: list[Member] = []
        fleet.on_gone(self._gone)

    @property
    def any_tripped(self) -> bool:
        """Whether there is an instance that must not be chosen freely."""
        return bool(self._tripped)

    def look(self, now: float) -> None:
        """Hold the members that may not be chosen at `now`, and let go of those that may."""
        for member in self._tripped:
            member.hold(member.breaker is not None and not member.breaker.admits(now))

    def all_ready(self, stage: Stage) -> list[Snapshot]:
        """What policies see of a stage when breakers are left out of account.

        When nothing but instances with open breakers is left, one of them is tried all the same: an error that might
        not have come is worse than one that does.
        """
        return [m.snapshot()._replace(ready=m.ready) for m in self._fleet.members(stage)]

    def began(self, member: Member, now: float) -> bool:
        """A leg to `member` begins.

        Returns:
            Whether it is the one that tries out whether the member works again. Then `trial_over` has to be called.
        """
        return member.breaker is not None and member.breaker.began(now)

    def trial_over(self, member: Member, now: float, *, verdict_follows: bool) -> None:
        """A trial has ended; if no verdict came or follows, the next request is one again.

        Args:
            member: Whose.
            now: When.
            verdict_follows: What decode does with the KV decides; it has as long as the breaker is open at most.
        """
        if member.breaker is not None:
            member.breaker.ended(now + self._rules.max_open_s if verdict_follows else None)

    def succeeded(self, member: Member, began_at: float) -> None:
        """A leg that began at `began_at` shows that `member` works."""
        breaker = member.breaker
        if breaker is None:
            return
        breaker.succeeded(began_at)
        self._let_go(member, "works again")

    def failed(self, member: Member, began_at: float, now: float, partner: Member | None = None) -> None:
        """A leg to `member` that began at `began_at` has failed.

        Args:
            member: Where.
            began_at: When the leg began.
            now: When it failed.
            partner: The prefill instance whose KV the leg was given, if that one may be at fault.
        """
        self._fleet.doubt(member)
        if partner is None:
            self._count(member, began_at, now, None)
            return
        self._fleet.doubt(partner)
        # An instance that is known not to work is the likely culprit; the other one is not blamed as well.
        guilty = [m for m in (member, partner) if m.breaker is not None and m.breaker.tripped]
        suspects = guilty or [member, partner]
        # Of two that reach their limit together it is the one that has failed with more than the other.
        suspects.sort(key=lambda m: -m.breaker.partners if m.breaker is not None else 0)
        for one in suspects:
            if self._count(one, began_at, now, (partner if one is member else member).name):
                return

    def _count(self, member: Member, began_at: float, now: float, partner: str | None) -> bool:
        if not self._fleet.is_current(member):
            return False
        if member.breaker is None:
            member.breaker = Breaker(self._rules)
        if not member.breaker.failed(began_at, now, partner):
            return False
        if member not in self._tripped:
            self._tripped.append(member)
        self._metrics.breaker_opened(member.stage, member.name)
        log.warning("%s instance %s gets no requests for a while: it has failed", member.stage, member.name)
        for other in self._fleet.members():
            if other.breaker is not None and other is not member:
                other.breaker.forgive(member.name)
                self._let_go(other, f"was not at fault, but {member.name}")
        return True

    def _let_go(self, member: Member, why: str) -> None:
        if member.breaker is not None and not member.breaker.tripped and member in self._tripped:
            self._tripped.remove(member)
            member.hold(False)
            log.info("%s instance %s gets requests again: it %s", member.stage, member.name, why)

    def _gone(self, member: Member) -> None:
        if member in self._tripped:
            self._tripped.remove(member)
