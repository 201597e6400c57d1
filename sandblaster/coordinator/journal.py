"""What a coordinator writes down, and where a run can go on from it.

Of each cut it keeps the state of the algorithm: some numbers, no vectors. The shards
keep the vectors (`parameter_server.cuts`). A run goes on from the newest cut of which
each of them has all vectors and the state is written here: as if nothing had been. If
there is none it goes on from the parameters of the newest cut that all shards have,
which the algorithm takes for a starting point.

    shard 0       shard 1      journal    a run goes on
    31 whole      31 whole     31         at 31, with its history
    30, 31 whole  30, 31       30         at 30, with its history
    28 whole      28 whole     31, 28     at 28, with its history
    31, (28)      (28)         31, 28     from the parameters of 28
    31, (0)       (0)          31         from the parameters where all began

The second line is of a resumed run whose newest snapshots were damaged: of each cut of
which shards keep a snapshot an entry is kept here.

When a run has ended, its last point is in the published values, and with it cut 0 from
then on: shards that nobody drives save that alone, if their vectors have moved on.

The state of a cut is of one method and one function. Who resumes a run may have chosen
others: then its cuts are so many points to begin at, and no more (`CheckpointEntry.goal`).

Grants are not written down: what an evaluation had gathered is given up with the epoch
in which it began, so no grant outlives its coordinator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.errors import StorageError
from distbelief.protocol import CheckpointRecord, Count
from distbelief.roles.role import Snapshot
from sandblaster.optimizers.base import IterationDone


N_ON_DISK: Final = 3
"""Cuts on disk of which entries are kept: so many snapshots are kept of each shard."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One cut, as the algorithm left it."""

    cut: Count
    iteration: Count
    offset: Count  # of those, how many the state does not know of
    samples: Count  # examples of all evaluations
    evaluations: Count = 0  # that were begun
    goal: str = ""  # which method was to minimise what
    state: str


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[CheckpointEntry, ...]
    on_disk: Count
    before_on_disk: tuple[Count, ...] = ()
    base_clocks: tuple[Count, ...] | None
    end_clocks: tuple[Count, ...] | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where to go on: at which cut, and with what."""

    cut: int
    whole: bool
    entry: CheckpointEntry | None  # None: nothing is known of it; it may be the beginning
    has_other_goal: bool = False  # so what is known of it does not count


@final
class Journal:
    """The coordinator's half of all cuts.

    Args:
        restored: What an earlier life has written, if there was one.
        goal: Which method minimises what; a state of another goal is not gone on from.

    Attributes:
        on_disk: The newest cut that every shard has on disk; 0: none.
        base_clocks: Of the shards' values before the first order; None: not known.
        end_clocks: Of the values that they published at the end; None: it goes on.
    """

    def __init__(self, restored: Snapshot | None, *, goal: str = "") -> None:
        self._goal = goal
        self._entries: dict[int, CheckpointEntry] = {}
        self.on_disk = 0
        self._before_on_disk: tuple[int, ...] = ()  # the newest last
        self._label = 0
        self.base_clocks: tuple[int, ...] | None = None
        self.end_clocks: tuple[int, ...] | None = None
        if restored is not None:
            self._restore(restored)

    def _restore(self, snapshot: Snapshot) -> None:
        try:
            facts = msgspec.json.decode(snapshot.facts.get("cuts", ""), type=_Facts)
            self._label = int(snapshot.label)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StorageError(
                f"snapshot {snapshot.label!r} of the coordinator cannot be read "
                f"({error}); delete it, and the one before is used"
            ) from None
        self._entries = {entry.cut: entry for entry in facts.entries}
        self.on_disk, self._before_on_disk = facts.on_disk, facts.before_on_disk
        self.base_clocks = facts.base_clocks
        self.end_clocks = facts.end_clocks

    # --------------------------------------------------------------------- writing

    def write(
        self, cut: int, iterated: IterationDone, *, samples: int, offset: int, evaluations: int = 0
    ) -> None:
        """Note a cut; `offset` iterations were made before the algorithm's first."""
        self._entries[cut] = CheckpointEntry(
            cut=cut,
            iteration=offset + iterated.iteration,
            offset=offset,
            samples=samples,
            evaluations=evaluations,
            goal=self._goal,
            state=iterated.state,
        )

    def confirm(self, cut: int) -> None:
        """This cut is safe here and on the shards: those before it can be forgotten.

        All but those that shards have on disk.
        """
        keep = {0, self.on_disk, *self._before_on_disk}
        keep.update(c for c in self._entries if c >= cut)
        self._entries = {c: e for c, e in self._entries.items() if c in keep}

    def checkpointed(self, cut: int) -> None:
        """Every shard has this cut on disk."""
        if cut != self.on_disk:
            before = (*self._before_on_disk, self.on_disk)
            self._before_on_disk = before[1 - N_ON_DISK :]
        self.on_disk = cut
        self.confirm(cut)

    def end(self, clocks: Sequence[int], *, entry: CheckpointEntry) -> None:
        """The run is over: its parameters are published, at these clocks."""
        self.end_clocks = tuple(clocks)
        self._entries[0] = entry

    def snapshot(self, *, incarnation: int) -> Snapshot:
        """Return it all, to be saved by this life of the coordinator."""
        self._label += 1
        facts = _Facts(
            entries=tuple(self._entries[cut] for cut in sorted(self._entries)),
            on_disk=self.on_disk,
            before_on_disk=self._before_on_disk,
            base_clocks=self.base_clocks,
            end_clocks=self.end_clocks,
        )
        return Snapshot(
            label=f"{self._label:012d}",
            arrays={},
            facts={"cuts": msgspec.json.encode(facts).decode(), "incarnation": str(incarnation)},
        )

    # -------------------------------------------------------------------- resuming

    def choose(self, held: Sequence[Sequence[CheckpointRecord]]) -> ResumePoint:
        """Return where to go on, given what each shard holds.

        Raises:
            StorageError: there is no point that all shards share.
        """
        begins = self.base_clocks
        if self._all_at(self.end_clocks, held):
            begins = self.end_clocks
        per_shard = [
            self._savepoints_of(k, records, begins=begins) for k, records in enumerate(held)
        ]
        shared = set(per_shard[0]).intersection(*per_shard[1:])
        if not shared:
            shown = "; ".join(
                f"shard {k}: {sorted(cuts) or 'none'}" for k, cuts in enumerate(per_shard)
            )
            raise StorageError(
                "the shards share no point from which the run could go on (cuts held: "
                f"{shown}): resume the run from its saved snapshots, or start anew"
            )
        whole = [
            cut for cut in shared if self._can_resume(cut) and all(cuts[cut] for cuts in per_shard)
        ]
        # A newer cut of which nothing is written down is one iteration newer at most.
        cut = max(whole or shared)
        known = cut > 0 or begins is self.end_clocks
        entry = self._entries.get(cut) if known else None
        has_other_goal = not whole and entry is not None and entry.goal != self._goal
        return ResumePoint(cut=cut, whole=bool(whole), entry=entry, has_other_goal=has_other_goal)

    def _can_resume(self, cut: int) -> bool:
        """Return whether a state of this cut is here, and of this goal."""
        entry = self._entries.get(cut)
        return entry is not None and entry.goal == self._goal

    def _all_at(
        self, clocks: Sequence[int] | None, held: Sequence[Sequence[CheckpointRecord]]
    ) -> bool:
        """Return whether cut 0 of each shard is of this clock."""
        if clocks is None or len(clocks) != len(held):
            return False
        return all(
            any(record.cut == 0 and record.clock == clock for record in records)
            for clock, records in zip(clocks, held, strict=True)
        )

    def _savepoints_of(
        self, k: int, records: Sequence[CheckpointRecord], *, begins: Sequence[int] | None
    ) -> Mapping[int, bool]:
        """Return (cut -> is it whole) of one shard."""
        cuts: dict[int, bool] = {}
        for record in records:
            at = None if begins is None else begins[k : k + 1]
            if record.cut == 0 and at is not None and tuple(at) != (record.clock,):
                continue  # its values are others than those that all began with
            cuts[record.cut] = cuts.get(record.cut, False) or record.whole
        return cuts
