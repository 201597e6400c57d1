"""Which replica computes which set of one batch.

    undealt --> dealt to one (or two) --> computed, granted, staged: `granting`
       ^                 |                    |
       +---- all gone ---+--- winner gone ----+

Rules (paper: Dean et al. 2012, section 4.2, and the keys of its rules):

* Sets are dealt a few at a time to whoever has almost nothing left to do, so a replica
  twice as fast does twice as many (DB-14). They are dealt in runs, first those that the
  replica computed the last time: its data is near.
* Nobody is dealt a set that the others would have done before: towards the end a slow
  replica waits. Of what it could do in time, it is dealt half: estimates err. Of the
  last sets, fewer than replicas, each is a whole one: as many replicas take one.
* A set may be dealt when it is within a window of the oldest that is not counted.
* When nothing is left to deal, an idle replica gets a second copy of the set that will
  be done last, if it would have it done before (DB-15), by more than a hiccup and a few
  percent of the evaluation. No set has three copies.

A word from a replica costs about the square root of how many there are, as `workloads`
keeps them in order; and so does every set that is dealt.
"""

import math
from typing import Final, final

from distbelief.messages import Account
from distbelief.roles import Seconds
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.crew import Copy, Crew, Member
from sandblaster.coordination.estimates import n_at_once
from sandblaster.coordination.granting import Granting, Numbers
from sandblaster.coordination.undealt import Undealt
from sandblaster.coordination.workloads import Workloads
from sandblaster.sets import BatchRange


_MARGIN: Final = 1.2
"""A backup must promise to be earlier by this factor ..."""

_SHARE: Final = 0.02
"""... and by this share of the time that the evaluation has taken."""


@final
class Dealing:
    """The sets of one evaluation.

    Args:
        config: Of the coordinator.
        crew: Who is there.
        batch: What is to be computed.
        numbers: To go on counting.

    Attributes:
        sets: What came of them.
        n_backups: Second copies dealt.
    """

    def __init__(
        self, config: CoordinatorConfig, *, crew: Crew, batch: BatchRange, numbers: Numbers
    ) -> None:
        self._config = config
        self._crew = crew
        self._batch = batch
        self._numbers = numbers
        self._loads = Workloads(config, crew)
        stop, size = batch.first + batch.n_examples, config.cutting.set_size
        starts = range(batch.first, stop, size)
        self.sets = Granting(starts, numbers=numbers, loads=self._loads)
        self._undealt = Undealt([numbers.owners.get(s) for s in starts], crew=crew)
        self._began_at: Seconds | None = None  # when first there was anybody to deal to
        self.n_backups = 0

    # ------------------------------------------------------------------------- events

    def heard(self, member: Member) -> None:
        """A member has come, or has spoken."""
        self._loads.touch(member)

    def account(self, member: Member, account: Account, now: Seconds) -> None:
        """A member says how it stands."""
        self._loads.touch(member)
        self.sets.account(member, account, now)

    def lost(self, member: Member, now: Seconds) -> None:
        """A member is gone, with all that it has not brought to its end."""
        self._loads.touch(member)
        for set_index in self.sets.lost(member, now):
            self._undealt.put_back(set_index)

    def changed(self) -> list[Member]:
        """Return who has something else to do than it was told; once."""
        changed, self.sets.changed = list(self.sets.changed.values()), {}
        return [member for member in changed if member is self._crew.get(member.name)]

    # ------------------------------------------------------------------------ dealing

    def deal(self, now: Seconds) -> None:
        """Give work to whoever has almost none."""
        if not len(self._crew):
            return
        if self._began_at is None:
            self._began_at = now
        self._undealt.release(self.sets.lowest + self._config.window_sets)
        self._loads.look(now)
        if self._undealt.n_dealable:
            if self._loads.is_known:
                self._deal_in_time(now)
            else:
                self._deal_fairly(now)
            self._loads.look(now)
        if self._config.backups and not self._undealt.n_dealable:
            self._back_up(now)

    def _deal_fairly(self, now: Seconds) -> None:
        """Give everybody the same: nobody knows how long a set takes."""

        def fair() -> int:
            return max(1, len(self._undealt) // (2 * len(self._crew)))

        loads = self._loads
        for member in _in_turn(loads.hungry() if fair() > 1 else loads.idle()):
            self._give_some(member, min(2, fair()) - len(member.outstanding), now)

    def _deal_in_time(self, now: Seconds) -> None:
        """Give whoever is hungry half of what it would do until all is done."""
        loads, undealt = self._loads, self._undealt
        whole = loads.end_of_whole(len(undealt), now)
        end = max(whole, loads.end(len(undealt), now))
        for member in _in_turn(loads.hungry(end, now)):
            if not undealt.n_dealable:
                break
            n_in_time = loads.n_in_time(member, end, now)
            at_once = n_at_once(member, loads.set_seconds(member))
            n_most = at_once + 1 - len(member.outstanding)
            n_given = self._give_some(member, min(n_most, math.ceil(n_in_time / 2)), now)
            if n_given and n_given == n_in_time and undealt.n_dealable:
                # The last of these is done later than it would be if it were parted:
                # so others have less to do. Otherwise the end is where it was.
                loads.look(now)
                end = max(whole, loads.end(len(undealt), now))

    def _give_some(self, member: Member, n_wanted: int, now: Seconds) -> int:
        if n_wanted < 1 or not self._undealt.n_dealable:
            return 0
        taken = self._undealt.take(member.name, n_wanted)
        for set_index in taken:
            self._give(member, set_index, now)
        return len(taken)

    def _give(self, member: Member, set_index: int, now: Seconds) -> None:
        self._numbers.attempt += 1
        if not member.outstanding:
            member.progress_at = now
        copy = Copy(
            set_index=set_index,
            attempt=self._numbers.attempt,
            n_examples=self._n_examples(set_index),
            dealt_at=now,
        )
        self.sets.give(member, copy)

    def _n_examples(self, set_index: int) -> int:
        start, stop = self._batch.set_bounds(set_index, self._config.cutting)
        return stop - start

    # ------------------------------------------------------------------- backup tasks

    def _back_up(self, now: Seconds) -> None:
        """Give idle members copies of the sets that will be done last."""
        limit = self._limit(now)
        size = self._config.cutting.set_size
        for member in _in_turn(self._loads.idle(limit)) if limit > 0.0 else ():
            # What is done last now may have been doubled since they were looked for.
            own = self._loads.seconds_to_begin_with(member, size)
            if own <= limit and self._backs_up(member, now):
                limit = min(limit, self._limit(now))

    def _limit(self, now: Seconds) -> Seconds:
        """Return how long a whole set may take whoever is to back up what is done last.

        Nobody who takes longer is worth it: a smaller set takes him no less than its
        share of that.
        """
        last = self._loads.last(now, push=self._numbers.push_seconds)
        if last is None:
            return 0.0
        seconds, copy = last
        worth = min(seconds / _MARGIN, seconds - self._least_saved(now))
        return worth * self._config.cutting.set_size / copy.n_examples

    def _backs_up(self, member: Member, now: Seconds) -> bool:
        """Give one a copy of what will be done last of the others', if worth it."""
        push = self._numbers.push_seconds
        last = self._loads.last(now, push=push, other_than=member)
        if last is None:
            return False
        seconds, copy = last
        own = self._loads.seconds_to_begin_with(member, copy.n_examples)
        if not own or seconds <= max(_MARGIN * own, own + self._least_saved(now)):
            return False
        self.n_backups += 1
        self._give(member, copy.set_index, now)
        self._loads.look(now)
        return True

    def _least_saved(self, now: Seconds) -> Seconds:
        """Return how much earlier a backup must promise to be."""
        assert self._began_at is not None
        taken = now - self._began_at
        return max(self._config.backup_seconds_min, _SHARE * taken)


def _in_turn(members: list[Member]) -> list[Member]:
    """Return them as they are dealt to: who has the least to do first."""
    return sorted(members, key=lambda m: (len(m.outstanding), m.name))
