"""How long things will take, from how long they took.

LATE (Zaharia et al. 2008) showed that what matters is the time to the end of a task,
not its progress, and that machines differ: so each replica has a pace of its own, and a
try that takes longer than it should is expected to take as long again.
"""

import math
from typing import Final

from distbelief.roles import Seconds
from sandblaster.coordination.crew import Copy, Member
from sandblaster.coordination.ranked import Line, Ranked


SHARE_OF_DEALING: Final = 0.01
"""Of the time of computing that dealing may take."""

N_DEALT_MAX: Final = 32
"""Sets dealt to one replica at once."""

_OVERDUE: Final = 1.25
"""Times what was expected: then the expectation is worth nothing."""


def n_at_once(member: Member, set_seconds: Seconds) -> int:
    """Return how many sets to deal at once, so that dealing costs next to nothing."""
    if member.turnaround is None or set_seconds <= 0.0:
        return 1
    wanted = member.turnaround / (SHARE_OF_DEALING * set_seconds)
    return max(1, min(N_DEALT_MAX, math.ceil(wanted)))


def left(member: Member, pace: float, lag: Seconds, now: Seconds) -> tuple[Line, Seconds]:
    """Return the seconds until a member has computed all that it was dealt.

    The first set is under way, the others wait for it; the first of an evaluation waits
    for the parameters.

    Args:
        member: Who.
        pace: Its seconds per example; 0: nobody knows.
        lag: How long it waits for parameters.
        now: The time.

    Returns:
        What holds now, and until when it does.
    """
    outstanding = member.outstanding
    if not outstanding:
        return Line(0.0), math.inf
    first = outstanding[0]
    begun = max(first.dealt_at, member.progress_at)
    expected = pace * first.n_examples + (0.0 if member.n_sets else lag)
    others = sum(pace * copy.n_examples for copy in outstanding[1:])
    elapsed = now - begun
    if elapsed < expected:
        return Line(begun + expected + others, -1), begun + expected
    if elapsed < _OVERDUE * expected:
        return Line(others), begun + _OVERDUE * expected
    return Line(others - begun, 1), math.inf


def seconds_to_end(members: Ranked, n_sets: int, now: Seconds) -> Seconds:
    """Return when so many more sets will be done, if they are dealt as well as can be.

    No member gets a set that another would have done before; sets may be parted, so the
    true time is later, by less than the quickest member takes for one.

    Args:
        members: Of each, the seconds until it has nothing left to compute; its weight
            is how many sets it computes per second.
        n_sets: To be dealt; at least one.
        now: The time.
    """
    end, n_before = math.inf, len(members) + 1
    while True:  # of those who have done before all others have: fewer each time
        n, speed, sets = members.below(end, now)
        # More of them, by rounding alone, where one is done as all the others are.
        if not n or n >= n_before:
            return end
        end, n_before = (n_sets + sets) / speed, n


def seconds_to_rival(copy: Copy, expected: Seconds, now: Seconds) -> Seconds:
    """Return by when a rival of a granted set must be computed to be done before it.

    Whoever is late takes as long again; a rival has all of its own push before it. So
    nobody rivals a push that may yet be in time.
    """
    return now - copy.granted_at - expected if is_overdue(copy, expected, now) else 0.0


def is_overdue(copy: Copy, expected: Seconds, now: Seconds) -> bool:
    """Return whether the push of a granted set takes longer than it should."""
    return now - copy.granted_at > max(_OVERDUE * expected, 0.0)
