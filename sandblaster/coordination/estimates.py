"""How long things will take, from how long they took.

LATE (Zaharia et al. 2008) showed that what matters is the time to the end of a task,
not its progress, and that machines differ: so each replica has a pace of its own, and a
try that takes longer than it should is expected to take as long again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from distbelief.roles import Seconds
from sandblaster.coordination.crew import Copy, Member, typical


SHARE_OF_DEALING: Final = 0.01
"""Of the time of computing that dealing may take."""

N_DEALT_MAX: Final = 32
"""Sets dealt to one replica at once."""

_OVERDUE: Final = 1.25
"""Times what was expected: then the expectation is worth nothing."""


def seconds_of(member: Member, n_examples: int, others: Iterable[Member]) -> Seconds:
    """Return how long a member computes so many examples; 0 if nobody knows."""
    pace = member.seconds_per_example
    if pace is None:
        pace = typical(other.seconds_per_example for other in others)
    return 0.0 if pace is None else pace * n_examples


def n_at_once(member: Member, set_seconds: Seconds) -> int:
    """Return how many sets to deal at once, so that dealing costs next to nothing."""
    if member.turnaround is None or set_seconds <= 0.0:
        return 1
    wanted = member.turnaround / (SHARE_OF_DEALING * set_seconds)
    return max(1, min(N_DEALT_MAX, math.ceil(wanted)))


def remaining(
    member: Member, others: Iterable[Member], now: Seconds
) -> Mapping[int, Seconds]:
    """Return when each set that a member has to compute will be done, by attempt.

    From now on; the first is under way, the others wait for it.
    """
    others = tuple(others)
    at: Seconds = 0.0
    times: dict[int, Seconds] = {}
    for copy in member.outstanding:
        expected = seconds_of(member, copy.n_examples, others)
        if not times:
            elapsed = now - max(copy.dealt_at, member.progress_at)
            on_time = elapsed < _OVERDUE * expected
            at = max(expected - elapsed, 0.0) if on_time else elapsed
        else:
            at += expected
        times[copy.attempt] = at
    return times


def seconds_to_end(members: Sequence[tuple[Seconds, Seconds]], n_sets: int) -> Seconds:
    """Return when so many more sets will be done, if they are dealt as well as can be.

    No member gets a set that another would have done before; sets may be parted, so the
    true time is later, by less than the quickest member takes for one.

    Args:
        members: Of each, the seconds until it has nothing left to compute, and those
            that a set takes it, which is more than 0.
        n_sets: To be dealt.
    """
    speed, sets, end = 0.0, float(n_sets), math.inf
    for begin, set_seconds in sorted(members):
        if begin >= end:
            break
        speed += 1.0 / set_seconds
        sets += begin / set_seconds
        end = sets / speed
    return end


def push_seconds(copy: Copy, expected: Seconds, now: Seconds) -> Seconds:
    """Return how long the push of a granted set will still take, likewise."""
    elapsed = now - copy.granted_at
    return elapsed if elapsed > max(_OVERDUE * expected, 0.0) else expected - elapsed
