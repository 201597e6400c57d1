"""Which copy of a shard leads, as far as one client can tell.

    shard-0 leads, number 3 --> Leading or Welcome, number 5 --> shard-0b leads

Rules:

* Leaders are ordered by their number alone, the `shard_incarnation` of what they say.
  Whoever says a lower one than the highest heard of is deposed, and is not heard.
* Of each copy the newest life is known, from the envelopes and from the driver. What an
  older life said, or what is said of it, means nothing any more.
* The numbers of two copies are the supervisor's, those of a single one its lives.
"""

from collections.abc import Sequence
from typing import final

from distbelief.roles import Address


@final
class Ranking:
    """The copies of one shard, as one client hears of them.

    Attributes:
        copies: One or two addresses.
        leader: Whoever said Welcome last; the first copy until somebody has.
        number: The highest that a leader is known to have; 0 if none is.
    """

    def __init__(self, copies: Sequence[Address]) -> None:
        self.copies = tuple(copies)
        self.leader = self.copies[0]
        self.number = 0
        self._lives = dict.fromkeys(self.copies, 0)

    @property
    def others(self) -> tuple[Address, ...]:
        """All copies but the leader."""
        return tuple(copy for copy in self.copies if copy != self.leader)

    def is_over(self, copy: Address, incarnation: int) -> bool:
        """Return whether `copy` has begun a later life than that."""
        return incarnation < self._lives[copy]

    def meet(self, copy: Address, incarnation: int) -> bool:
        """Note that this life began; return whether that of the leader is over so."""
        before = self._lives[copy]
        self._lives[copy] = max(before, incarnation)
        return copy == self.leader and 0 < before < incarnation

    def rise(self, number: int) -> bool:
        """Note that somebody leads under `number`; return whether none higher did."""
        rises = number > self.number
        self.number = max(self.number, number)
        return rises
