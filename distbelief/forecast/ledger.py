"""What every role did in a run in virtual time: work, messages, and when.

An observer of the simulation. It adds up, and keeps single pieces of work only where a
timeline is wanted.
"""

from dataclasses import dataclass, field
from typing import Final, final

from distbelief.roles import Address, Compute, Computed, Lane, Seconds
from distbelief.simulation.world import Happening


N_SPANS_MAX: Final = 500_000
"""Pieces of work of a timeline; a viewer does not take many more."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work.

    Attributes:
        role: Whose.
        lane: Of that role.
        name: Of the work.
        ends: When the role was told that it is done; its lane may be further by then.
        seconds: That it took.
    """

    role: Address
    lane: Lane
    name: str
    ends: Seconds
    seconds: Seconds


@final
@dataclass(slots=True, kw_only=True)
class Ledger:
    """What was done.

    Attributes:
        keeps_spans: Whether single pieces of work are kept.
        spans: Those, in the order in which their roles were told.
        busy: Seconds of work in the compute lane, by role.
        lost_spans: How many did not fit.
    """

    keeps_spans: bool = False
    spans: list[Span] = field(default_factory=list)
    busy: dict[Address, Seconds] = field(default_factory=dict)
    lost_spans: int = 0
    _lanes: dict[tuple[Address, str], Lane] = field(default_factory=dict)

    def observe(self, happening: Happening, now: Seconds) -> None:
        """Take note of an event, and of what was done in reply."""
        for action in happening.actions:
            if isinstance(action, Compute):
                self._lanes[happening.name, action.name] = action.lane
        event = happening.event
        if isinstance(event, Computed):
            self._worked(happening.name, event, now)

    def _worked(self, name: Address, event: Computed, now: Seconds) -> None:
        lane = self._lanes.get((name, event.name), Lane.COMPUTE)
        if lane is Lane.COMPUTE:
            self.busy[name] = self.busy.get(name, 0.0) + event.seconds
        if not self.keeps_spans:
            return
        if len(self.spans) >= N_SPANS_MAX:
            self.lost_spans += 1
            return
        self.spans.append(
            Span(role=name, lane=lane, name=event.name, ends=now, seconds=event.seconds)
        )
