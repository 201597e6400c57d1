"""Savepoints: states of the named vectors to which a coordinator can return a shard.

    savepoint    kept                          until
    newest       every vector named            the next one is settled
    the last     every vector named            the newest is settled: the coordinator has
                                               recorded its own state of it
    on disk      the parameters                every shard has a newer one on disk
    0            the parameters                every shard has one on disk

Creating a savepoint copies nothing: a vector is copied before its first change. One iteration of
L-BFGS with m pairs changes five of its 2m + 3 vectors.
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
    earlier: tuple[int, int] | None = None  # number and clock of the older savepoint


@final
@dataclass(frozen=True, slots=True)
class KeptParameters:
    """The parameters of a savepoint that every shard has on disk, or of savepoint 0."""

    cut: int
    clock: int
    parameters: Vector


@final
@dataclass(frozen=True, slots=True)
class LoadedSavepoint:
    """The savepoint in a snapshot."""

    cut: int  # its number
    vectors: Mapping[str, Vector]  # all vectors that it names
    earlier: KeptParameters | None = None  # an older savepoint that every shard has, if any


@final
class _Savepoint:
    def __init__(self, cut: int, names: Iterable[str]) -> None:
        self.cut = cut
        self.names = frozenset(names)
        self.saved: dict[str, Vector] = {}


@final
class Savepoints:
    """All savepoints of one shard.

    If another shard has lost its memory, this one can still return to the parameters of the
    newest savepoint that both have on disk, or to savepoint 0. Requests that do not fit the kept
    savepoints raise RemoteProtocolError.

    Args:
        vector_store: The named vectors.
        base_clock: Clock of the published values before the first command.
    """

    def __init__(self, vector_store: VectorStore, *, base_clock: int) -> None:
        self._vector_store = vector_store
        self._live: list[_Savepoint] = []  # the oldest first
        self._kept: list[KeptParameters] = []  # the oldest first
        self._base_clock: int | None = base_clock  # until the first restore

    def records(self) -> tuple[CheckpointRecord, ...]:
        records = [
            CheckpointRecord(cut=savepoint.cut, whole=True, clock=0) for savepoint in self._live
        ]
        records += [
            CheckpointRecord(cut=kept.cut, whole=False, clock=kept.clock) for kept in self._kept
        ]
        if self._base_clock is not None:
            records.append(CheckpointRecord(cut=0, whole=False, clock=self._base_clock))
        return tuple(records)

    # ---------------------------------------------------------------------- create

    def add(self, savepoint: Savepoint, *, settled: int) -> None:
        """Create a savepoint of the present vectors, and drop those before `settled`."""
        self.drop_before(settled)
        missing = set(savepoint.vectors) - set(self._vector_store.names())
        if missing:
            raise RemoteProtocolError(
                f"savepoint {savepoint.cut} names vectors that do not exist here: {sorted(missing)}"
            )
        if len(self._live) >= _N_LIVE_MAX:
            raise RemoteProtocolError(
                f"cannot create savepoint {savepoint.cut} while {len(self._live)} others are kept: "
                "settle them first"
            )
        self._live.append(_Savepoint(savepoint.cut, savepoint.vectors))

    def drop_before(self, settled: int) -> None:
        if any(savepoint.cut == settled for savepoint in self._live):
            self._live = [savepoint for savepoint in self._live if savepoint.cut >= settled]

    def forget(self, on_disk: int) -> None:
        """Drop the parameters of savepoints before this one, which every shard has on disk."""
        if any(kept.cut == on_disk for kept in self._kept):
            self._kept = [kept for kept in self._kept if kept.cut >= on_disk]

    def copy_before_write(self, names: Iterable[str]) -> None:
        """Copy those of these vectors that a savepoint needs unchanged."""
        wanted = {
            name
            for name in names
            if any(
                name in savepoint.names and name not in savepoint.saved for savepoint in self._live
            )
        }
        for name, vector in self._vector_store.export(tuple(wanted)).items():
            copy = vector.copy()
            for savepoint in self._live:
                if name in savepoint.names:
                    savepoint.saved.setdefault(name, copy)

    # ---------------------------------------------------------------------- return

    def return_to(self, cut: int, *, whole: bool, values: Callable[[], Vector]) -> None:
        """Return to a savepoint; only the vectors of that savepoint remain.

        Args:
            cut: Number of the savepoint.
            whole: Restore all of its vectors, or only the parameters.
            values: Returns the published parameters, which are savepoint 0.
        """
        if whole:
            self._restore_all(cut)
            return
        if cut == 0 and self._base_clock is not None:
            self._vector_store.restore({PARAMETERS: values()})
            self._keep_parameters(0, clock=self._base_clock)
            self._base_clock = None
        else:
            self._vector_store.restore({PARAMETERS: self._parameters_of(cut)})
        self._live = []

    def _parameters_of(self, cut: int) -> Vector:
        for live in self._live:
            if live.cut == cut:
                return self._vectors_of(live)[PARAMETERS]
        for kept in self._kept:
            if kept.cut == cut:
                return kept.parameters
        raise self._unknown(cut)

    def _restore_all(self, cut: int) -> None:
        for live in self._live:
            if live.cut == cut:
                vectors = self._vectors_of(live)
                self._vector_store.restore(vectors)
                live.saved.clear()
                self._live = [live]
                return
        raise self._unknown(cut)

    def _vectors_of(self, savepoint: _Savepoint) -> Mapping[str, Vector]:
        return self._vector_store.export(tuple(savepoint.names)) | savepoint.saved

    def _unknown(self, cut: int) -> RemoteProtocolError:
        held = [(record.cut, record.whole) for record in self.records()]
        return RemoteProtocolError(f"no savepoint {cut} here; (number, whole) are: {held}")

    # ------------------------------------------------------------------------- disk

    def check_current(self, cut: int) -> None:
        """Raise unless this savepoint is the newest and no vector has changed since."""
        if not self._live or self._live[-1].cut != cut or self._live[-1].saved:
            raise RemoteProtocolError(
                f"cannot save savepoint {cut}: vectors have changed since; create it again"
            )

    @property
    def current(self) -> int | None:
        newest = self._live[-1] if self._live else None
        return None if newest is None or newest.saved else newest.cut

    def extend(self, snapshot: Snapshot, *, cut: int) -> Snapshot:
        """Return the snapshot plus the vectors of the newest savepoint, which must be current.

        Also plus the parameters of the oldest kept savepoint. All shards have that one, so shards
        that die around a partly failed save still have a common savepoint.
        """
        newest = self._live[-1]
        vectors = self._vector_store.export(tuple(newest.names))
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
        self._keep_parameters(cut, clock=0)

    def restore(self, saved: LoadedSavepoint) -> None:
        self._vector_store.restore(saved.vectors)
        self._base_clock = None
        self._live = [_Savepoint(saved.cut, saved.vectors)]
        self._kept = [] if saved.earlier is None else [saved.earlier]
        self._keep_parameters(saved.cut, clock=0)

    def _keep_parameters(self, cut: int, *, clock: int) -> None:
        parameters = self._vector_store.vector(PARAMETERS).copy()
        self._kept.append(KeptParameters(cut, clock, parameters))
        if len(self._kept) > _N_KEPT_MAX:  # another shard's saves fail repeatedly
            del self._kept[1]


def split(snapshot: Snapshot) -> tuple[Snapshot, LoadedSavepoint | None]:
    """Return what `extend` was given, and the savepoint if there is one, or raise StorageError."""
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
    saved = LoadedSavepoint(facts.cut, vectors, _earlier(snapshot, facts))
    return plain, saved


def _earlier(snapshot: Snapshot, facts: _SavepointFacts) -> KeptParameters | None:
    parameters, wanted = snapshot.arrays.get(_EARLIER), facts.earlier
    if (parameters is None) is not (wanted is None):
        raise _damaged(snapshot, f"array {_EARLIER!r} and fact {_FACT!r} disagree")
    if parameters is None or wanted is None:
        return None
    current = snapshot.arrays[f"{_PREFIX}{PARAMETERS}"]
    if (parameters.shape, parameters.dtype) != (current.shape, current.dtype):
        raise _damaged(
            snapshot,
            f"array {_EARLIER!r} has shape {parameters.shape} and dtype "
            f"{parameters.dtype}, not {current.shape} and {current.dtype}",
        )
    cut, clock = wanted
    return KeptParameters(cut, clock, parameters.copy())


def _damaged(snapshot: Snapshot, what: str) -> StorageError:
    return StorageError(f"snapshot {snapshot.label!r}: {what}; delete it to use the one before")
