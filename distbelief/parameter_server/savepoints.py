"""Points of a run to which a shard can return: cuts.

A coordinator marks a cut where its algorithm could go on from what it has written down,
and the shards from the vectors they hold; it names those. Marking copies nothing: a
vector is copied before it is first changed. Of L-BFGS with m pairs, which holds 2m + 3
vectors, one iteration changes five.

    cut         held                              until
    newest      whole: every vector named         the next is settled
    the last    whole                             the newest is settled: the coordinator
                                                  has its own half of it on disk
    on disk     the parameters                    every shard has a newer one on disk
    0           the parameters                    every shard has one on disk

Rules:

* Who returns to a cut holds its vectors and no others.
* If another shard has lost its memory, this one can still return to the parameters of
  the newest cut that both have: the last one on disk, or cut 0. A snapshot holds the
  parameters of that cut too: shards that die around a save which only some of them
  could finish share it, whatever each of them has on disk.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import CheckpointRecord, Savepoint
from distbelief.roles.role import Snapshot


PARAMETERS: Final = "parameters"

_PREFIX = "vector."
_EARLIER = "earlier"
_FACT = "cut"
_N_LIVE_MAX = 2
_N_KEPT_MAX = 3


class _SavepointFacts(msgspec.Struct, frozen=True, kw_only=True):
    cut: int
    vectors: tuple[str, ...]
    earlier: tuple[int, int] | None = None  # cut and clock of what is kept besides


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """The parameters of a cut that every shard has on disk, or of cut 0."""

    cut: int
    clock: int
    parameters: Vector


@final
@dataclass(frozen=True, slots=True)
class SavedSavepoint:
    """What a snapshot holds of cuts.

    Attributes:
        cut: Its number.
        vectors: All that the cut named.
        earlier: Another cut, which every shard has; None: this one is all there is.
    """

    cut: int
    vectors: Mapping[str, Vector]
    earlier: Kept | None = None


@final
class _Savepoint:
    """A marked cut, and what of it was changed since."""

    def __init__(self, cut: int, names: Iterable[str]) -> None:
        self.cut = cut
        self.names = frozenset(names)
        self.saved: dict[str, Vector] = {}


@final
class Savepoints:
    """All cuts of one shard.

    Args:
        algebra: Whose vectors they are.
        base_clock: Of the published values before any order.
    """

    def __init__(self, algebra: VectorStore, *, base_clock: int) -> None:
        self._algebra = algebra
        self._live: list[_Savepoint] = []  # the oldest first
        self._kept: list[Kept] = []  # the oldest first
        self._base_clock: int | None = base_clock  # until the first order

    def records(self) -> tuple[CheckpointRecord, ...]:
        """Return every cut that can be recalled."""
        records = [CheckpointRecord(cut=cut.cut, whole=True, clock=0) for cut in self._live]
        records += [
            CheckpointRecord(cut=kept.cut, whole=False, clock=kept.clock) for kept in self._kept
        ]
        if self._base_clock is not None:
            records.append(CheckpointRecord(cut=0, whole=False, clock=self._base_clock))
        return tuple(records)

    # ------------------------------------------------------------------------ marks

    def mark(self, mark: Savepoint, *, settled: int) -> None:
        """The vectors are at a new cut; those before `settled` are not needed.

        Raises:
            RemoteProtocolError: a vector of the cut is not there, or there would be too
                many cuts.
        """
        self.settle(settled)
        missing = set(mark.vectors) - set(self._algebra.names())
        if missing:
            raise RemoteProtocolError(
                f"cut {mark.cut} names vectors {sorted(missing)}, which are not here"
            )
        if len(self._live) >= _N_LIVE_MAX:
            raise RemoteProtocolError(
                f"cut {mark.cut} is marked while {len(self._live)} others are needed: "
                "say first which are settled"
            )
        self._live.append(_Savepoint(mark.cut, mark.vectors))

    def settle(self, settled: int) -> None:
        """Forget the cuts before that one, if it is here."""
        if any(cut.cut == settled for cut in self._live):
            self._live = [cut for cut in self._live if cut.cut >= settled]

    def forget(self, on_disk: int) -> None:
        """Every shard has that cut on disk: nobody returns to what was there before."""
        if any(kept.cut == on_disk for kept in self._kept):
            self._kept = [kept for kept in self._kept if kept.cut >= on_disk]

    def touch(self, names: Iterable[str]) -> None:
        """These vectors are about to be changed."""
        wanted = {
            name
            for name in names
            if any(name in cut.names and name not in cut.saved for cut in self._live)
        }
        for name, vector in self._algebra.export(tuple(wanted)).items():
            copy = vector.copy()
            for cut in self._live:
                if name in cut.names:
                    cut.saved.setdefault(name, copy)

    # ----------------------------------------------------------------------- recall

    def recall(self, cut: int, *, whole: bool, values: Callable[[], Vector]) -> None:
        """Be at that cut again.

        Args:
            cut: Which.
            whole: With all of its vectors, or with its parameters only.
            values: Returns the published parameters, where cut 0 begins.

        Raises:
            RemoteProtocolError: there is no such cut.
        """
        if whole:
            self._recall_whole(cut)
            return
        if cut == 0 and self._base_clock is not None:
            self._algebra.restore({PARAMETERS: values()})
            self._keep_parameters(0, clock=self._base_clock)
            self._base_clock = None
        else:
            self._algebra.restore({PARAMETERS: self._parameters_of(cut)})
        self._live = []

    def _parameters_of(self, cut: int) -> Vector:
        for live in self._live:
            if live.cut == cut:
                return self._vectors_of(live)[PARAMETERS]
        for kept in self._kept:
            if kept.cut == cut:
                return kept.parameters
        raise self._unknown(cut)

    def _recall_whole(self, cut: int) -> None:
        for live in self._live:
            if live.cut == cut:
                vectors = self._vectors_of(live)
                self._algebra.restore(vectors)
                live.saved.clear()
                self._live = [live]
                return
        raise self._unknown(cut)

    def _vectors_of(self, cut: _Savepoint) -> Mapping[str, Vector]:
        return self._algebra.export(tuple(cut.names)) | cut.saved

    def _unknown(self, cut: int) -> RemoteProtocolError:
        held = [(record.cut, record.whole) for record in self.records()]
        return RemoteProtocolError(f"cut {cut} is not here; (cut, whole) are: {held}")

    # ------------------------------------------------------------------------- disk

    def check_present(self, cut: int) -> None:
        """Raise if that is not the present.

        Raises:
            RemoteProtocolError: another cut is the newest, or something changed since.
        """
        if not self._live or self._live[-1].cut != cut or self._live[-1].saved:
            raise RemoteProtocolError(
                f"cut {cut} is to be saved, and is not the present: mark it first"
            )

    @property
    def present(self) -> int | None:
        """The newest cut, if nothing has changed since."""
        newest = self._live[-1] if self._live else None
        return None if newest is None or newest.saved else newest.cut

    def extend(self, snapshot: Snapshot, *, cut: int) -> Snapshot:
        """Return the snapshot with the vectors of the newest cut: the present.

        And with the parameters of the oldest that is kept, which all shards share.
        """
        newest = self._live[-1]
        vectors = self._algebra.export(tuple(newest.names))
        shared = self._kept[0] if self._kept and self._kept[0].cut != cut else None
        facts = _SavepointFacts(
            cut=cut,
            vectors=tuple(sorted(newest.names)),
            earlier=None if shared is None else (shared.cut, shared.clock),
        )
        return Snapshot(
            label=snapshot.label,
            arrays={
                **snapshot.arrays,
                **{f"{_PREFIX}{name}": vector for name, vector in vectors.items()},
                **({} if shared is None else {_EARLIER: shared.parameters}),
            },
            facts={**snapshot.facts, _FACT: msgspec.json.encode(facts).decode()},
        )

    def on_disk(self, cut: int) -> None:
        """The newest cut, which is the present, is safe on disk."""
        self._keep_parameters(cut, clock=0)

    def restore(self, saved: SavedSavepoint) -> None:
        """Be at a cut that was read from disk."""
        self._algebra.restore(saved.vectors)
        self._base_clock = None
        self._live = [_Savepoint(saved.cut, saved.vectors)]
        self._kept = [] if saved.earlier is None else [saved.earlier]
        self._keep_parameters(saved.cut, clock=0)

    def _keep_parameters(self, cut: int, *, clock: int) -> None:
        parameters = self._algebra.vector(PARAMETERS).copy()
        self._kept.append(Kept(cut, clock, parameters))
        if len(self._kept) > _N_KEPT_MAX:  # another shard's disk fails, and fails
            del self._kept[1]


def split(snapshot: Snapshot) -> tuple[Snapshot, SavedSavepoint | None]:
    """Return what `extend` was given, and the cut, if it holds one.

    Raises:
        StorageError: the snapshot is damaged.
    """
    text = snapshot.facts.get(_FACT)
    if text is None:
        return snapshot, None
    try:
        facts = msgspec.json.decode(text, type=_SavepointFacts)
    except msgspec.MsgspecError as error:
        raise _damaged(snapshot, f"fact {_FACT!r} cannot be read ({error})") from None
    arrays = dict(snapshot.arrays)
    vectors = {
        name.removeprefix(_PREFIX): arrays.pop(name)
        for name in snapshot.arrays
        if name.startswith(_PREFIX)
    }
    if vectors.keys() != set(facts.vectors) or PARAMETERS not in vectors:
        raise _damaged(snapshot, f"it has vectors {sorted(vectors)}, not {sorted(facts.vectors)}")
    plain = Snapshot(
        label=snapshot.label,
        arrays={name: array for name, array in arrays.items() if name != _EARLIER},
        facts={name: fact for name, fact in snapshot.facts.items() if name != _FACT},
    )
    saved = SavedSavepoint(facts.cut, vectors, _earlier(snapshot, facts))
    return plain, saved


def _earlier(snapshot: Snapshot, facts: _SavepointFacts) -> Kept | None:
    parameters, wanted = snapshot.arrays.get(_EARLIER), facts.earlier
    if (parameters is None) is not (wanted is None):
        raise _damaged(snapshot, f"array {_EARLIER!r} and what is said of it disagree")
    if parameters is None or wanted is None:
        return None
    present = snapshot.arrays[f"{_PREFIX}{PARAMETERS}"]
    if (parameters.shape, parameters.dtype) != (present.shape, present.dtype):
        raise _damaged(
            snapshot,
            f"array {_EARLIER!r} has shape {parameters.shape} and dtype "
            f"{parameters.dtype}, not {present.shape} and {present.dtype}",
        )
    cut, clock = wanted
    return Kept(cut, clock, parameters.copy())


def _damaged(snapshot: Snapshot, what: str) -> StorageError:
    return StorageError(
        f"snapshot {snapshot.label!r}: {what}; delete it, and the one before is used"
    )
