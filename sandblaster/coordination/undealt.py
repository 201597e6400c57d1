"""The sets of one batch that nobody has been dealt, by whose data they are.

    own            sets that a replica computed the last time: its data is near
    nobody's       of those who are gone, and of data that nobody had
    others'        the last ones of whoever has the most left

Sets are taken in runs that follow each other, the first of these that there are.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import final

from distbelief.roles import Address
from sandblaster.coordination.crew import Crew


@final
class Undealt:
    """Sets that are to be dealt.

    Args:
        owners: Who computed each set the last time; None: nobody did.
        crew: Who is there.
    """

    def __init__(self, owners: Sequence[Address | None], *, crew: Crew) -> None:
        self._owners = owners
        self._crew = crew
        self._limit = 0  # sets from there on are not to be dealt yet
        self._is_dealable = bytearray(len(owners))
        self._left: dict[Address | None, list[int]] = {}  # dealable sets, by owner
        self._most: list[tuple[int, int, Address]] = []  # -how many, the first, whose
        self._gone: set[Address | None] = set()  # owners who are not there
        self._n_changes = -1  # of the crew, when that was looked up
        self._n_left = len(owners)
        self._n_dealable = 0

    def __len__(self) -> int:
        return self._n_left

    @property
    def n_dealable(self) -> int:
        """How many may be dealt now."""
        return self._n_dealable

    def release(self, limit: int) -> None:
        """Let sets below this be dealt."""
        limit = min(limit, len(self._owners))
        if limit <= self._limit:
            return
        new = range(self._limit, limit)
        for index in new:
            owner = self._owners[index]
            if owner not in self._left:
                self._left[owner] = []
                self._n_changes = -1
            self._left[owner].append(index)
            self._is_dealable[index] = True
        for owner in {self._owners[index] for index in new}:
            self._note(owner)
        self._n_dealable += len(new)
        self._limit = limit

    def put_back(self, index: int) -> None:
        """Let a set that was taken be dealt again."""
        owner = self._owners[index]
        insort(self._left[owner], index)
        self._note(owner)
        self._is_dealable[index] = True
        self._n_left += 1
        self._n_dealable += 1

    def take(self, name: Address, n_wanted: int) -> list[int]:
        """Return sets for somebody: at least one, and at most so many.

        At least one must be dealable.
        """
        own = self._left.get(name)
        if own:
            run = self._run(own[0], n_wanted, {name})
        else:
            gone = self._owners_gone()
            heads = [left[0] for owner in gone if (left := self._left.get(owner))]
            if heads:
                run = self._run(min(heads), n_wanted, gone)
            else:
                most = self._left[self._richest()]
                run = _beginning(most[-n_wanted:])
        for index in run:
            self._remove(index)
        return run

    def _run(
        self, first: int, n_wanted: int, owners: set[Address | None] | set[Address]
    ) -> list[int]:
        stop = min(first + n_wanted, self._limit)
        index = first + 1
        while index < stop and self._is_dealable[index] and self._owners[index] in owners:
            index += 1
        return list(range(first, index))

    def _remove(self, index: int) -> None:
        owner = self._owners[index]
        left = self._left[owner]
        del left[bisect_left(left, index)]
        self._note(owner)
        self._is_dealable[index] = False
        self._n_left -= 1
        self._n_dealable -= 1

    def _owners_gone(self) -> set[Address | None]:
        if self._n_changes != self._crew.n_changes:
            self._n_changes = self._crew.n_changes
            self._gone = {
                owner for owner in self._left if owner is None or self._crew.get(owner) is None
            }
        return self._gone

    def _note(self, owner: Address | None) -> None:
        """Remember how much an owner has left."""
        left = self._left[owner]
        if owner is not None and left:
            heappush(self._most, (-len(left), left[0], owner))

    def _richest(self) -> Address:
        """Return who has the most left; what was true some time ago is let go of."""
        while True:
            n, first, owner = self._most[0]
            left = self._left[owner]
            if left and (-n, first) == (len(left), left[0]):
                return owner
            heappop(self._most)


def _beginning(indices: list[int]) -> list[int]:
    """Return the first ones, as far as they follow each other."""
    run = indices[:1]
    for index in indices[1:]:
        if index != run[-1] + 1:
            break
        run.append(index)
    return run
