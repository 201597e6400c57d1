"""What outlives a course: the figures of all, and what was asked for meanwhile."""

from collections import deque
from dataclasses import dataclass, field
from typing import final

from distbelief.roles import Seconds
from sandblaster.coordination.shares import Shares
from sandblaster.requests import Iterated


@final
@dataclass(slots=True, kw_only=True)
class Figures:
    """Of all courses together.

    Attributes:
        iterated: The newest.
        offset: Iterations before the algorithm began anew.
        samples: Examples of all evaluations that came to their end.
        n_wasted: Examples computed in vain.
        n_backups: Second copies dealt.
        n_evaluations: Begun.
        shares: Of the replicas' time.
        save_again_at: When a snapshot may be taken.
    """

    iterated: Iterated | None = None
    offset: int = 0
    samples: int = 0
    n_wasted: int = 0
    n_backups: int = 0
    n_evaluations: int = 0
    shares: Shares = field(default_factory=Shares)
    save_again_at: Seconds = 0.0

    @property
    def iteration(self) -> int:
        """How many there were."""
        return self.offset + (self.iterated.iteration if self.iterated else 0)


@final
@dataclass(slots=True, kw_only=True)
class Wishes:
    """What the supervisor has asked for.

    Attributes:
        saves: Labels of snapshots.
        saved: What came of them: label, error.
        stop: Whether to end.
    """

    saves: deque[str] = field(default_factory=deque)
    saved: deque[tuple[str, str | None]] = field(default_factory=deque)
    stop: bool = False
