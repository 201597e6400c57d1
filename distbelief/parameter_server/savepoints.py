"""Savepoints: states of the named vectors to which a coordinator can return a shard.

    savepoint    kept                          until
    newest       every vector named            the next one is settled
    the last     every vector named            the newest is settled: the coordinator has
                                               recorded its own state of it
    on disk      the parameters                every shard has a newer one on disk
    0            the parameters                every shard has one on disk

A savepoint copies nothing: the store changes no array that a savepoint has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.core.errors import RemoteProtocolError, RestoreError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import CheckpointRecord, Savepoint
from distbelief.protocol.role import Snapshot


PARAMETERS: Final = "parameters"

_PREFIX = "vector."
_EARLIER = "earlier"
_FACT = "cut"
_N_LIVE_MAX = 2
_N_KEPT_MAX = 3


class _SavepointFacts(msgspec.Struct, frozen=True, kw_only=True):
    savepoint: int = msgspec.field(name="cut")
    vectors: tuple[str, ...]
    earlier: tuple[int, int] | None = None  # number and clock of the older savepoint


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedVectors:
    """A savepoint: all vectors that it names, or just the parameters."""

    number: int
    vectors: Mapping[str, Vector]
    clock: int = 0  # of savepoint 0: of the published values


class SavepointState(msgspec.Struct, frozen=True):
    """All that `Savepoints` has."""

    live: list[SavedVectors]
    kept: list[SavedVectors]
    base_clock: int | None


@final
class Savepoints:
    """All savepoints of one shard.

    If another shard has lost its memory, this one can still return to the parameters of the
    newest savepoint that both have on disk, or to savepoint 0. Requests that do not fit the kept
    savepoints raise RemoteProtocolError.
    """

    def __init__(self, vector_store: VectorStore) -> None:
        self._vector_store = vector_store
        vector_store.held = self._arrays
        self._live: list[SavedVectors] = []  # whole ones, the oldest first
        self._kept: list[SavedVectors] = []  # parameters only, the oldest first
        # Of the published values before the first command; None once it cannot return there.
        self._base_clock: int | None = None

    @property
    def has_some(self) -> bool:
        return bool(self._live or self._kept)

    def state(self) -> SavepointState:
        return SavepointState(self._live, self._kept, self._base_clock)

    def adopt(self, state: SavepointState) -> None:
        self._live, self._kept, self._base_clock = state.live, state.kept, state.base_clock

    def drop(self) -> None:
        self._live, self._kept = [], []

    def begin_at(self, clock: int) -> None:
        """Note the clock of the published values, which are savepoint 0 unless one was restored."""
        if not self._live:
            self._base_clock = clock

    def records(self) -> tuple[CheckpointRecord, ...]:
        saved = [(one, True) for one in self._live] + [(one, False) for one in self._kept]
        if self._base_clock is not None:
            saved.append((SavedVectors(0, {}, self._base_clock), False))
        return tuple(
            CheckpointRecord(savepoint=one.number, whole=whole, clock=one.clock)
            for one, whole in saved
        )

    def add(self, savepoint: Savepoint, *, settled: int) -> None:
        """Create a savepoint of the present vectors, and drop those before `settled`."""
        self.drop_before(settled)
        vectors = self._vector_store.export(savepoint.vectors)
        missing = set(savepoint.vectors) - vectors.keys()
        if missing:
            raise RemoteProtocolError(
                f"savepoint {savepoint.number} names vectors that do not exist here: "
                f"{sorted(missing)}"
            )
        if len(self._live) >= _N_LIVE_MAX:
            raise RemoteProtocolError(
                f"cannot create savepoint {savepoint.number}: settle one of {len(self._live)} first"
            )
        self._live.append(SavedVectors(savepoint.number, vectors))

    def drop_before(self, settled: int) -> None:
        if any(live.number == settled for live in self._live):
            self._live = [live for live in self._live if live.number >= settled]

    def forget(self, on_disk: int) -> None:
        """Drop the parameters of savepoints before this one, which every shard has on disk."""
        if any(kept.number == on_disk for kept in self._kept):
            self._kept = [kept for kept in self._kept if kept.number >= on_disk]

    def _arrays(self) -> Iterator[Vector]:
        for saved in (*self._live, *self._kept):
            yield from saved.vectors.values()

    def return_to(self, savepoint: int, *, whole: bool, values: Callable[[], Vector]) -> None:
        """Return to a savepoint: to all of its vectors if `whole`, or only to the parameters.

        Other vectors are dropped. `values` returns the published parameters, which are savepoint 0.
        """
        places = self._live if whole else [*self._live, *self._kept]
        saved = next((one for one in places if one.number == savepoint), None)
        if savepoint == 0 and self._base_clock is not None and not whole:
            self._vector_store.restore({PARAMETERS: values()})
            self._keep_parameters(0, clock=self._base_clock)
            self._base_clock = None
        elif saved is not None:
            names = saved.vectors if whole else (PARAMETERS,)
            self._vector_store.return_to({name: saved.vectors[name] for name in names})
        else:
            held = [(record.savepoint, record.whole) for record in self.records()]
            raise RemoteProtocolError(f"no savepoint {savepoint} here; (number, whole) are: {held}")
        self._live = [saved] if whole and saved is not None else []

    def check_current(self, savepoint: int) -> None:
        if self.current != savepoint:
            raise RemoteProtocolError(
                f"cannot save savepoint {savepoint}: vectors have changed since; create it again"
            )

    @property
    def current(self) -> int | None:
        """The newest savepoint, if no vector has changed since."""
        if not self._live:
            return None
        newest, now = self._live[-1], self._vector_store.export()
        is_same = all(now.get(name) is vector for name, vector in newest.vectors.items())
        return newest.number if is_same else None

    def extend(self, snapshot: Snapshot, *, savepoint: int) -> Snapshot:
        """Return the snapshot plus the vectors of the newest savepoint, which must be current.

        Also plus the parameters of the oldest kept savepoint. All shards have that one, so shards
        that die around a partly failed save still have a common savepoint.
        """
        vectors = self._live[-1].vectors
        arrays = dict(snapshot.arrays)
        arrays |= {f"{_PREFIX}{name}": vector for name, vector in vectors.items()}
        earlier = None
        if self._kept and self._kept[0].number != savepoint:
            shared = self._kept[0]
            arrays[_EARLIER] = shared.vectors[PARAMETERS]
            earlier = shared.number, shared.clock
        facts = _SavepointFacts(
            savepoint=savepoint, vectors=tuple(sorted(vectors)), earlier=earlier
        )
        return Snapshot(
            label=snapshot.label,
            arrays=arrays,
            facts={**snapshot.facts, _FACT: msgspec.json.encode(facts).decode()},
        )

    def on_disk(self, savepoint: int) -> None:
        self._keep_parameters(savepoint, clock=0)

    def restore(self, found: Sequence[SavedVectors]) -> None:
        """Restore the savepoint of a snapshot, if it has one: what `split` has returned."""
        if found:
            saved, *self._kept = found
            self._vector_store.restore(saved.vectors)
            self._base_clock = None
            self._live = [SavedVectors(saved.number, self._vector_store.export())]
            self._keep_parameters(saved.number, clock=0)

    def _keep_parameters(self, savepoint: int, *, clock: int) -> None:
        self._kept.append(SavedVectors(savepoint, self._vector_store.export((PARAMETERS,)), clock))
        if len(self._kept) > _N_KEPT_MAX:  # another shard's saves fail repeatedly
            del self._kept[1]


def split(snapshot: Snapshot) -> tuple[Snapshot, Sequence[SavedVectors]]:
    """Return what `extend` was given, and the savepoints in it, or raise RestoreError.

    The first is the whole one. The second has the parameters that all shards have, if any.
    """

    def damaged(what: str) -> RestoreError:
        return RestoreError(
            f"snapshot {snapshot.label!r}: {what}; move its file away to use the one before"
        )

    text = snapshot.facts.get(_FACT)
    if text is None:
        return snapshot, ()
    try:
        facts = msgspec.json.decode(text, type=_SavepointFacts)
    except msgspec.MsgspecError as error:
        raise damaged(f"fact {_FACT!r} cannot be read ({error})") from None
    arrays = dict(snapshot.arrays)
    parameters = arrays.pop(_EARLIER, None)
    vectors = {
        name.removeprefix(_PREFIX): arrays.pop(name)
        for name in snapshot.arrays
        if name.startswith(_PREFIX)
    }
    if vectors.keys() != set(facts.vectors) or PARAMETERS not in vectors:
        raise damaged(f"it has vectors {sorted(vectors)}, not {sorted(facts.vectors)}")
    saved = [SavedVectors(facts.savepoint, vectors)]
    if parameters is not None and facts.earlier is not None:
        now = vectors[PARAMETERS]
        if (parameters.shape, parameters.dtype) != (now.shape, now.dtype):
            raise damaged(
                f"array {_EARLIER!r} is {parameters.shape} of {parameters.dtype}, not {now.shape}"
            )
        savepoint, clock = facts.earlier
        saved.append(SavedVectors(savepoint, {PARAMETERS: parameters.copy()}, clock))
    elif parameters is not None or facts.earlier is not None:
        raise damaged(f"array {_EARLIER!r} and fact {_FACT!r} disagree")
    own_facts = {name: fact for name, fact in snapshot.facts.items() if name != _FACT}
    return Snapshot(label=snapshot.label, arrays=arrays, facts=own_facts), saved
