"""Journal of the coordinator: the state of the optimizer at each savepoint, and where to resume.

Shards keep the vectors (`parameter_server.savepoints`), the journal some scalars. A run
resumes from the newest savepoint that all shards have whole and that has an entry here;
otherwise from the parameters of the newest savepoint that all shards have.

    shard 0       shard 1      journal    the run resumes
    31 whole      31 whole     31         at 31, with its history
    30, 31 whole  30, 31       30         at 30, with its history
    28 whole      28 whole     31, 28     at 28, with its history
    31, (28)      (28)         31, 28     from the parameters of 28
    31, (0)       (0)          31         from the initial parameters

After the end of a session, savepoint 0 is what it has published, and has an entry, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.core.errors import RestoreError, StorageError
from distbelief.protocol import CheckpointRecord, Count
from distbelief.protocol.role import Snapshot


N_ON_DISK: Final = 3
"""Savepoints on disk whose entries are kept: as many as snapshots of each shard. If newer
snapshots are damaged, a run resumes from an older one with its history."""

OTHER: Final = (
    "what was saved is of other settings or files, or lacks the state of the program: restore "
    "them, or start again, with --from-scratch"
)


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One savepoint, as the optimizer left it."""

    savepoint: Count = msgspec.field(name="cut")
    iteration: Count  # since the beginning
    offset: Count  # iterations before the method last restarted
    samples: Count  # examples of all evaluations
    evaluations: Count = 0  # begun
    wasted: Count = 0  # examples computed more than once
    backups: Count = 0  # backup tasks assigned
    seconds: dict[str, float] = {}  # of the workers, by what they were spent on
    goal: str = ""  # method and function
    state: str  # as the optimizer left it


class _End(msgspec.Struct, frozen=True, kw_only=True):
    """An end of a session: what its shards have saved then, if they have."""

    clocks: tuple[Count, ...]  # of the published values
    entry: CheckpointEntry  # of these, which are savepoint 0
    savepoint: Count  # the last; shards that are still there save it, too


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[CheckpointEntry, ...]
    on_disk: Count
    before_on_disk: tuple[Count, ...] = ()
    base_clocks: tuple[Count, ...] | None
    end_clocks: tuple[Count, ...] | None = None
    end_savepoint: Count = 0
    ends_before: tuple[_End, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where to resume: at which savepoint, and with which state."""

    savepoint: int
    whole: bool  # with the optimizer's state
    has_all: bool  # whether all shards have all of its vectors
    entry: CheckpointEntry | None  # None: no state is known; it may be the initial point
    has_other_goal: bool = False  # the state is of another goal and is not used


@final
class Journal:
    """The coordinator's part of all savepoints.

    `goal` is method and function; a state of another goal is only a starting point. With
    `parameters_only` that is all that savepoints have, and shards need nothing else to go on.
    """

    def __init__(
        self, restored: Snapshot | None, *, goal: str = "", parameters_only: bool = False
    ) -> None:
        self._goal = goal
        self._parameters_only = parameters_only
        self._entries: dict[int, CheckpointEntry] = {}
        self.on_disk = 0  # the newest savepoint that every shard has on disk; 0: none
        self.recorded = 0  # the same, of which the journal on disk has the entry
        self._in_snapshot = 0
        self._before_on_disk: tuple[int, ...] = ()  # the newest last
        self._label = 0
        # Clocks of the shards' values before the first command; None: not known.
        self.base_clocks: tuple[int, ...] | None = None
        # Clocks of the values published at the end; None: the run goes on.
        self.end_clocks: tuple[int, ...] | None = None
        self._end_savepoint = 0
        # Ends of earlier sessions, the newest last. The journal of an end is on disk before the
        # shards are: if they are killed in between, they have an earlier end.
        self._ends_before: tuple[_End, ...] = ()
        if restored is not None:
            self._restore(restored)

    def _restore(self, snapshot: Snapshot) -> None:
        try:
            facts = msgspec.json.decode(snapshot.facts.get("cuts", ""), type=_Facts)
            self._label = int(snapshot.label)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RestoreError(
                f"snapshot {snapshot.label!r} of the coordinator cannot be read "
                f"({error}): move its file away to use the one before"
            ) from None
        self._entries = {entry.savepoint: entry for entry in facts.entries}
        self.on_disk, self._before_on_disk = facts.on_disk, facts.before_on_disk
        self.recorded = self.on_disk
        self.base_clocks = facts.base_clocks
        self.end_clocks, self._end_savepoint = facts.end_clocks, facts.end_savepoint
        self._ends_before = facts.ends_before

    def write(self, entry: CheckpointEntry) -> None:
        self._entries[entry.savepoint] = entry

    def saved(self) -> None:
        """Note that the last snapshot is on disk."""
        self.recorded = self._in_snapshot

    def confirm(self, savepoint: int) -> None:
        """Drop entries before a savepoint that is safe everywhere, but for those on disk."""
        keep = {0, self.on_disk, *self._before_on_disk, self._end_savepoint}
        keep.update(end.savepoint for end in self._ends_before)
        keep.update(c for c in self._entries if c >= savepoint)
        self._entries = {c: e for c, e in self._entries.items() if c in keep}

    def checkpointed(self, savepoint: int) -> None:
        """Note that every shard has this savepoint on disk."""
        if savepoint != self.on_disk:
            before = (*self._before_on_disk, self.on_disk)
            self._before_on_disk = before[1 - N_ON_DISK :]
        self.on_disk = savepoint
        self.confirm(savepoint)

    def end(self, clocks: Sequence[int], entry: CheckpointEntry, *, savepoint: int) -> None:
        """Note that the run is over: its parameters are published at these clocks.

        `savepoint` is the last one, which shards may still have then.
        """
        self._ends_before = self._ends()[1 - N_ON_DISK :]
        self.end_clocks, self._end_savepoint = tuple(clocks), savepoint
        # Shards without a coordinator save the published values alone: as savepoint 0.
        self._entries[0] = entry

    def snapshot(self, *, incarnation: int) -> Snapshot:
        self._label += 1
        self._in_snapshot = self.on_disk
        facts = _Facts(
            entries=tuple(self._entries[number] for number in sorted(self._entries)),
            on_disk=self.on_disk,
            before_on_disk=self._before_on_disk,
            base_clocks=self.base_clocks,
            end_clocks=self.end_clocks,
            end_savepoint=self._end_savepoint,
            ends_before=self._ends_before,
        )
        return Snapshot(
            label=f"{self._label:012d}",
            arrays={},
            facts={"cuts": msgspec.json.encode(facts).decode(), "incarnation": str(incarnation)},
        )

    def choose(self, held: Sequence[Sequence[CheckpointRecord]]) -> ResumePoint:
        """Return where to resume, given the savepoints that each shard holds."""
        # After an end, savepoint 0 of a shard is the published result.
        ends, entries = self._ends_until(held), dict(self._entries)
        begins = self.base_clocks
        if ends:
            begins, entries[0] = ends[-1].clocks, ends[-1].entry
        can_resume = {number for number, one in entries.items() if one.goal == self._goal}
        per_shard = [
            self._savepoints_of(k, records, begins=begins) for k, records in enumerate(held)
        ]
        shared = set(per_shard[0]).intersection(*per_shard[1:])
        if self._parameters_only:  # without its state it can only start
            if entries and not can_resume:
                raise StorageError(OTHER)
            shared = {one for one in shared if one == 0 or one in can_resume}
        if not shared:
            shown = "; ".join(
                f"shard {k}: {sorted(known) or 'none'}" for k, known in enumerate(per_shard)
            )
            raise StorageError(
                f"the shards share no savepoint to resume from (they hold {shown}): resume from "
                "saved snapshots, or start again"
            )
        whole = [
            one
            for one in shared
            if one in can_resume
            and (
                all(known[one] for known in per_shard)
                or (self._parameters_only and (one > 0 or ends))
            )
        ]
        # A newer savepoint without an entry is at most one iteration newer.
        savepoint = max(whole or shared)
        if savepoint:
            ends = [end for end in self._ends() if end.savepoint <= savepoint]
        entry = entries.get(savepoint) if savepoint or ends else None
        self._return_to(ends)
        has_other_goal = not whole and entry is not None and entry.goal != self._goal
        return ResumePoint(
            savepoint=savepoint,
            whole=bool(whole),
            has_all=all(known[savepoint] for known in per_shard),
            entry=entry,
            has_other_goal=has_other_goal,
        )

    def _ends(self) -> tuple[_End, ...]:
        if self.end_clocks is None or 0 not in self._entries:
            return self._ends_before
        last = _End(clocks=self.end_clocks, entry=self._entries[0], savepoint=self._end_savepoint)
        return (*self._ends_before, last)

    def _ends_until(self, held: Sequence[Sequence[CheckpointRecord]]) -> Sequence[_End]:
        """Return the ends until the one whose values the shards have; none if it is not known."""
        ends = [*self._ends()]
        while ends and not self._all_at(ends[-1].clocks, held):
            ends.pop()
        return ends

    def _return_to(self, ends: Sequence[_End]) -> None:
        """Forget the ends after these: the shards have not saved them."""
        if ends:
            *before, last = ends
            self._ends_before = tuple(before)
            self.end_clocks, self._end_savepoint = last.clocks, last.savepoint
            self._entries[0] = last.entry

    def _all_at(self, clocks: Sequence[int], held: Sequence[Sequence[CheckpointRecord]]) -> bool:
        return len(clocks) == len(held) and all(
            any(record.savepoint == 0 and record.clock == clock for record in records)
            for clock, records in zip(clocks, held, strict=True)
        )

    def _savepoints_of(
        self, k: int, records: Sequence[CheckpointRecord], *, begins: Sequence[int] | None
    ) -> Mapping[int, bool]:
        savepoints: dict[int, bool] = {}
        for record in records:
            at = None if begins is None else begins[k : k + 1]
            if record.savepoint == 0 and at is not None and tuple(at) != (record.clock,):
                continue  # not the values that all shards began with
            savepoints[record.savepoint] = savepoints.get(record.savepoint, False) or record.whole
        return savepoints
