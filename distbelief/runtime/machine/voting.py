"""A step that is computed, until all machines have said what they have of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from distbelief.roles import Compute
from distbelief.runtime.execution.execution import Found
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.duty import Vote
from distbelief.runtime.machine.living import Living


SETTLE: Final = "machine:settle"


@final
@dataclass(frozen=True, slots=True)
class Ballot:
    """A step that is computed.

    Attributes:
        vote: What this machine has of it.
        found: Its result.
        chosen: Its samples.
    """

    vote: Vote
    found: Found
    chosen: Chosen


@final
class Voting:
    """One machine's votes.

    Args:
        living: Its life, which knows what all have agreed on.

    Attributes:
        square: What was said last.
        sample: Likewise, of who is to blame.
    """

    def __init__(self, living: Living) -> None:
        self.square = 0.0
        self.sample: int | None = None
        self._living = living
        self._ballot: Ballot | None = None

    @property
    def is_open(self) -> bool:
        """Whether a step waits for what all have of it."""
        return self._ballot is not None

    def cast(self, ballot: Ballot) -> None:
        """Vote on a step."""
        self.square, self.sample = ballot.vote.square, ballot.vote.sample
        self._ballot = ballot

    def drop(self) -> None:
        """Forget the step: its life is over."""
        self._ballot = None

    def count(self, step: int) -> Sequence[Compute]:
        """Return what is done with the result, once all have agreed on it.

        Args:
            step: The next one.
        """
        ballot = self._ballot
        if ballot is None or self._living.agreed < step:
            return []
        living = self._living
        work = partial(ballot.vote.settle, living.square, living.sample)
        return [Compute(name=SETTLE, work=work, cost=ballot.vote.cost)]

    def settled(self) -> Ballot:
        """Return the step that was counted; none is open any more."""
        ballot, self._ballot = self._ballot, None
        assert ballot is not None
        return ballot
