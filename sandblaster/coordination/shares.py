"""What the time of a run's replicas goes into: shares, which sum to 1.

    Open answered                                               Seal, Perform, Open
    ----+----------+-----------+---------+-----------+---------+-------------------+
        | fetching | computing | staging | computing | waiting | saving, algebra   |
            parameters   a set     its sum    the last   for others

Replicas say how long they computed; what lies between is by the coordinator's clock,
from one word of theirs to the next. So samples that are read more slowly than they are
computed on count as fetching and staging. What is computed in vain is computing as
well. A replica that leaves takes its part of that evaluation with it.
"""

from collections.abc import Mapping
from typing import Final, final

from distbelief.roles import Seconds
from sandblaster.coordination.crew import Crew


NAMES: Final = ("computing", "fetching", "staging", "waiting", "algebra", "saving")


@final
class Shares:
    """Seconds of all replicas together, in all evaluations that came to their end."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._began_at: Seconds = 0.0
        self._ended_at: Seconds | None = None  # the evaluation before, in this course

    def course_begins(self) -> None:
        """What was under way is given up."""
        self._ended_at = None

    def evaluation_begins(self, crew: Crew, now: Seconds) -> None:
        """Until now shards had orders, and replicas nothing."""
        if self._ended_at is not None:
            self._seconds["algebra"] += len(crew) * (now - self._ended_at)
        self._began_at = now

    def evaluation_ends(self, crew: Crew, now: Seconds) -> None:
        """Every set counts, or none will."""
        for member in crew:
            spent = member.spent
            there = now - max(self._began_at, member.joined_at)
            self._seconds["computing"] += spent.computing
            self._seconds["fetching"] += spent.fetching
            self._seconds["staging"] += spent.staging
            self._seconds["waiting"] += max(0.0, there - spent.total)
        self._ended_at = now

    def saved(self, crew: Crew, *, since: Seconds, now: Seconds) -> None:
        """Snapshots were taken, between two evaluations."""
        if self._ended_at is not None:
            self._seconds["saving"] += len(crew) * (now - since)
            self._ended_at += now - since

    def counters(self) -> Mapping[str, float]:
        """Return each as a share of all; zeros before the first evaluation's end."""
        total = sum(self._seconds.values()) or 1.0
        return {f"{name}_share": part / total for name, part in self._seconds.items()}
