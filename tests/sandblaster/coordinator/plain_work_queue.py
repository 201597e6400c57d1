"""Dealing as its rules say, without a thought for what it costs: R^2 log R a word."""

import math
from bisect import insort
from collections.abc import Iterable, Iterator

from distbelief.protocol import WorkReport
from distbelief.roles.role import Address, Seconds
from sandblaster.chunks import BatchRange
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.speed import n_at_once, seconds_to_rival
from sandblaster.coordinator.work_queue import Commits, ExpectedFinish, GrantNumbers
from sandblaster.coordinator.workers import ChunkCopy, WorkerPool, WorkerState, typical


class PlainDealing:
    """Which member computes which set: looks at all of them, each time."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        crew: WorkerPool,
        batch: BatchRange,
        numbers: GrantNumbers,
    ) -> None:
        self.config, self.crew, self.batch, self.numbers = config, crew, batch, numbers
        stop = batch.first + batch.n_examples
        starts = range(batch.first, stop, config.cutting.set_size)
        loads = ExpectedFinish(config, crew)  # nobody looks at it
        self.sets = Commits(starts, numbers=numbers, loads=loads)
        self.undealt = list(range(len(starts)))
        self.began_at: Seconds | None = None
        self.whole: Seconds = 0.0
        self.n_backups = 0

    def account(self, member: WorkerState, account: WorkReport, now: Seconds) -> None:
        self.sets.account(member, account, now)

    def heard(self, member: WorkerState) -> None:
        """Nothing is remembered."""

    def lost(self, member: WorkerState, now: Seconds) -> None:
        for set_index in self.sets.lost(member, now):
            insort(self.undealt, set_index)

    def changed(self) -> list[WorkerState]:
        changed, self.sets.changed = list(self.sets.changed.values()), {}
        return [member for member in changed if member is self.crew.get(member.name)]

    # ------------------------------------------------------------------------ dealing

    def deal(self, now: Seconds) -> None:
        members = sorted(self.crew, key=lambda m: (len(m.outstanding), m.name))
        if members and self.began_at is None:
            self.began_at = now
        self.whole = self.end_of_whole(now)
        for member in members:
            n_wanted = self.n_wanted(member, now) if self.undealt else 0
            if n_wanted:
                for set_index in self.take(member, n_wanted):
                    self.give(member, set_index, now)
        if self.config.backups and not self.dealable:
            for member in members:
                if not member.outstanding:
                    self.back_up(member, now)

    def n_wanted(self, member: WorkerState, now: Seconds) -> int:
        n_held = len(member.outstanding)
        at_once = n_at_once(member, self.set_seconds(member))
        if n_held > at_once // 2 + 1:
            return 0
        n_most = at_once + 1 - n_held
        if self.set_seconds(member) <= 0.0:
            fair = max(1, len(self.undealt) // (2 * len(self.crew)))
            return max(0, min(n_most, fair - n_held))
        return min(n_most, math.ceil(self.n_in_time(member, now) / 2))

    def n_in_time(self, member: WorkerState, now: Seconds) -> int:
        paces = {m.name: self.set_seconds(m) for m in self.crew}
        begins = {
            m.name: max(remaining(m, self.crew, now).values(), default=0.0) for m in self.crew
        }
        speed, sets, end = 0.0, float(len(self.undealt)), math.inf
        for begin, name in sorted((begin, name) for name, begin in begins.items()):
            if begin >= end:
                break
            speed += 1.0 / paces[name]
            sets += begin / paces[name]
            end = sets / speed
        left = max(self.whole, end + min(paces.values())) - begins[member.name]
        return max(0, math.floor(left / paces[member.name] + 1e-9))

    def end_of_whole(self, now: Seconds) -> Seconds:
        """All that everybody could do, one set after the other, in order of time."""
        n_sets = len(self.undealt)
        ends: list[Seconds] = []
        for member in self.crew:
            seconds = self.set_seconds(member)
            if seconds:
                end = max(remaining(member, self.crew, now).values(), default=0.0)
                for _ in range(n_sets):
                    end += seconds
                    ends.append(end)
        return sorted(ends)[n_sets - 1] if n_sets and ends else 0.0

    def set_seconds(self, member: WorkerState) -> Seconds:
        return seconds_of(member, self.config.cutting.set_size, self.crew)

    def give(self, member: WorkerState, set_index: int, now: Seconds) -> None:
        self.numbers.attempt += 1
        start, stop = self.batch.set_bounds(set_index, self.config.cutting)
        if not member.outstanding:
            member.progress_at = now
        copy = ChunkCopy(
            set_index=set_index, attempt=self.numbers.attempt, n_examples=stop - start, dealt_at=now
        )
        self.sets.give(member, copy)

    def take(self, member: WorkerState, n_wanted: int) -> list[int]:
        dealable = self.dealable
        if not dealable:
            return []
        whose = {index: self.owner(index) for index in dealable}
        present = {m.name for m in self.crew}
        for wanted in (
            [i for i in dealable if whose[i] == member.name],
            [i for i in dealable if whose[i] not in present],
        ):
            if wanted:
                taken = run(wanted, n_wanted)
                break
        else:
            left: dict[Address | None, list[int]] = {}
            for index in dealable:
                left.setdefault(whose[index], []).append(index)
            most = max(left.values(), key=len)
            taken = run(most[-n_wanted:], n_wanted)
        self.undealt = [index for index in self.undealt if index not in taken]
        return taken

    @property
    def dealable(self) -> list[int]:
        limit = self.sets.lowest + self.config.window_sets
        return [index for index in self.undealt if index < limit]

    def owner(self, set_index: int) -> Address | None:
        start, _ = self.batch.set_bounds(set_index, self.config.cutting)
        return self.numbers.owners.get(start)

    # ------------------------------------------------------------------- backup tasks

    def back_up(self, member: WorkerState, now: Seconds) -> None:
        assert self.began_at is not None
        least = max(self.config.backup_seconds_min, 0.02 * (now - self.began_at))
        latest, most = None, 0.0
        for copy, seconds in self.unfinished(now):
            holders = self.sets._sets[copy.set_index].holders
            if len(holders) >= 2 or member in holders.values():
                continue
            if seconds > most:
                latest, most = copy, seconds
        if latest is None:
            return
        own = seconds_of(member, latest.n_examples, self.crew)
        if own and not member.n_sets:
            own += lag_of(member, self.crew)
        if own > 0.0 and most > max(1.2 * own, own + least):
            self.n_backups += 1
            self.give(member, latest.set_index, now)

    def unfinished(self, now: Seconds) -> Iterator[tuple[ChunkCopy, Seconds]]:
        for member in self.crew:
            times = remaining(member, self.crew, now)
            for copy in member.copies.values():
                if copy.result is None:
                    yield copy, times[copy.attempt]
                elif copy.grant:
                    yield copy, seconds_to_rival(copy, self.numbers.push_seconds, now)


def seconds_of(member: WorkerState, n_examples: int, others: Iterable[WorkerState]) -> Seconds:
    """Return how long a member computes so many examples; 0 if nobody knows."""
    pace = member.seconds_per_example
    if pace is None:
        pace = typical(other.seconds_per_example for other in others)
    return 0.0 if pace is None else pace * n_examples


def lag_of(member: WorkerState, others: Iterable[WorkerState]) -> Seconds:
    """Return how long a member waits for parameters."""
    if member.lag is not None:
        return member.lag
    return max((other.lag for other in others if other.lag is not None), default=0.0)


def remaining(
    member: WorkerState, others: Iterable[WorkerState], now: Seconds
) -> dict[int, Seconds]:
    """Return in how many seconds each set of a member will be computed, by attempt."""
    others = tuple(others)
    at: Seconds = 0.0
    times: dict[int, Seconds] = {}
    for copy in member.outstanding:
        expected = seconds_of(member, copy.n_examples, others)
        if not times:
            if not member.n_sets:
                expected += lag_of(member, others)
            elapsed = now - max(copy.dealt_at, member.progress_at)
            on_time = elapsed < 1.25 * expected
            at = max(expected - elapsed, 0.0) if on_time else elapsed
        else:
            at += expected
        times[copy.attempt] = at
    return times


def run(indices: list[int], n_max: int) -> list[int]:
    """Return the first indices that follow each other, so many at the most."""
    found = [indices[0]]
    for index in indices[1:n_max]:
        if index != found[-1] + 1:
            break
        found.append(index)
    return found
